"""Every view of every plan against slices of the full tensors, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rollplex.errors import ConfigError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import Alias, LayoutPlan, Parameter, Piece, Rebuild, Refresh, plan
from rollplex.layout.parallel.split import Part, Range, Split
from rollplex.layout.parameters import parameter_table
from rollplex.layout.published import QWEN2_5_VL
from rollplex.layout.shape import ModelShape
from support.layouts import rollouts, shapes, trainings, verify
from support.slices import DEGREES, small_shape

DTYPES = ("bfloat16", "float32", "float64")
thorough = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def planned(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, dtype: str = "bfloat16", **options: Any
) -> LayoutPlan:
    return plan(parameter_table(shape, dtype=dtype, freeze_vision=False), shape, training, rollout, **options)


def of_name(parameters: tuple[Parameter, ...], end: str) -> Parameter:
    return next(parameter for parameter in parameters if parameter.name.endswith(end))


@given(shape=shapes(), training=trainings, rollout=rollouts, dtype=st.sampled_from(DTYPES))
@thorough
def test_every_view_is_the_slice_and_every_byte_is_held_once(
    shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, dtype: str
) -> None:
    verify(planned(shape, training, rollout, dtype), shape, dtype)


@pytest.mark.parametrize(("training", "rollout"), list(product(DEGREES, DEGREES)))
def test_every_pair_of_degrees_holds_with_fewer_heads_than_ranks(training: int, rollout: int) -> None:
    shape = small_shape()
    verify(planned(shape, TrainingLayout(degree=training), RolloutLayout(degree=rollout)), shape, "bfloat16")


@given(data=st.data(), shape=shapes(), training=trainings, rollout=rollouts)
@thorough
def test_a_piece_that_lies_one_number_off_is_caught(
    data: st.DataObject, shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout
) -> None:
    right = planned(shape, training, rollout)
    device = data.draw(st.integers(0, len(right.devices) - 1))
    parameters = right.devices[device].rollout
    number = data.draw(st.integers(0, len(parameters) - 1))
    pieces = parameters[number].pieces
    position = data.draw(st.integers(0, len(pieces) - 1))
    by = data.draw(st.sampled_from([-right.item_bytes, right.item_bytes]))
    piece = pieces[position]
    sources = [] if isinstance(piece.holding, Alias) else ["source"]
    wrong = moved(piece, by, data.draw(st.sampled_from(["at", *sources])))
    assume(not padding(piece, shape))  # zeros are zeros one number on, too
    with pytest.raises(AssertionError):
        verify(with_piece(right, device, number, position, wrong), shape, "bfloat16")


def padding(piece: Piece, shape: ModelShape) -> bool:
    """Whether nothing of the piece is in transformers' parameter."""
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=False)
    held = {p.hf_name: p for entry in table.entries for p in entry.pieces}
    of = held[piece.part.split(":")[0]]
    real = of.cols[1] - of.cols[0] if of.cols else of.rows[1] - of.rows[0]
    return ":" not in piece.part and piece.of[0] >= real


def moved(piece: Piece, by: int, which: str) -> Piece:
    if which == "at" or isinstance(piece.holding, Alias):
        return replace(piece, at=replace(piece.at, offset=piece.at.offset + by))
    source = replace(piece.holding.source, offset=piece.holding.source.offset + by)
    return replace(piece, holding=replace(piece.holding, source=source))


def with_piece(right: LayoutPlan, device: int, number: int, position: int, piece: Piece) -> LayoutPlan:
    own = right.devices[device]
    pieces = list(own.rollout[number].pieces)
    pieces[position] = piece
    rollout = list(own.rollout)
    rollout[number] = replace(rollout[number], pieces=tuple(pieces))
    devices = list(right.devices)
    devices[device] = replace(own, rollout=tuple(rollout))
    return replace(right, devices=tuple(devices))


def off_by_one_rows(self: Any, split: Split, part: Part, rank: int) -> Range:
    start, stop = even(self, split, part, rank)
    return (min(start + 1, part.size), min(stop + 1, part.size)) if split.axis == "rows" and rank else (start, stop)


def off_by_one_columns(self: Any, split: Split, part: Part, rank: int) -> Range:
    start, stop = even(self, split, part, rank)
    return (start - 1, stop - 1) if split.axis == "columns" and start else (start, stop)


def off_by_one_head(self: Any, split: Split, part: Part, rank: int) -> Range:
    start, stop = heads(self, split, part, rank)
    return heads(self, split, part, (rank + 1) % self.degree) if part.shared_heads else (start, stop)


even, heads = TrainingLayout.shard, RolloutLayout.shard


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (TrainingLayout, off_by_one_rows),
        (TrainingLayout, off_by_one_columns),
        (RolloutLayout, off_by_one_head),
    ],
)
def test_a_shard_rule_that_is_off_by_one_is_caught(
    layout: type, rule: Callable[..., Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = small_shape()
    monkeypatch.setattr(layout, "shard", rule)
    with pytest.raises(AssertionError):
        verify(planned(shape, TrainingLayout(degree=4), RolloutLayout(degree=4)), shape, "bfloat16")


@pytest.mark.parametrize("size", QWEN2_5_VL)
def test_without_tensor_parallelism_the_storage_is_the_parameter_table(size: str) -> None:
    shape = QWEN2_5_VL[size]
    table = parameter_table(shape, dtype="bfloat16", freeze_vision=True)
    (device,) = plan(table, shape, TrainingLayout(degree=1), RolloutLayout(degree=1, one_tensor=True)).devices
    stored = device.storage.shared
    assert [(s.name, s.shape, s.offset, s.size_bytes) for s in stored] == [
        (e.name, e.shape, e.offset, e.size_bytes) for e in table.entries
    ]
    assert device.storage.total_bytes == table.total_bytes
    assert {type(p.holding) for parameter in device.rollout for p in parameter.pieces} == {Alias}
    assert [p.trained for p in device.rollout] == [entry.trainable for entry in table.entries]


def test_the_finer_rows_are_contiguous_and_the_finer_columns_strided() -> None:
    shape = small_shape()
    device = planned(shape, TrainingLayout(degree=4), RolloutLayout(degree=2), "float32").devices[1]
    (q,) = of_name(device.training, "q_proj.weight").pieces
    (stored,) = [s for s in device.storage.shared if s.name.endswith("self_attn.qkv_proj.weight")]
    assert stored.shape == (4 * 4 + 2 * 4, 6), "4 heads of q and one each of k and v"
    assert (q.of, q.at.shape, q.at.strides) == ((8, 16), (8, 6), (6, 1))
    assert q.at.offset == stored.offset + 8 * 6 * 4
    (down,) = of_name(device.training, "mlp.down_proj.weight").pieces
    assert (down.of, down.at.shape, down.at.strides) == ((4, 8), (6, 4), (8, 1))


def test_pieces_of_the_coarser_shard_are_refreshed_from_the_rank_that_trains_them() -> None:
    shape = small_shape(kv_heads=4)
    group = planned(shape, TrainingLayout(degree=4), RolloutLayout(degree=2))
    down = of_name(group.devices[3].rollout, "model.layers.0.mlp.down_proj.weight")
    assert [(p.of, type(p.holding)) for p in down.pieces] == [((8, 12), Refresh), ((12, 16), Alias)]
    holding = down.pieces[0].holding
    assert isinstance(holding, Refresh)
    assert (holding.source.device, holding.source.shape, holding.source.strides) == (2, (6, 4), (8, 1))


def test_a_head_that_ranks_share_is_trained_in_parts_and_refreshed_not_rebuilt() -> None:
    shape = small_shape()  # 2 K/V heads of 4 rows on 8 ranks: one row each
    group = planned(shape, TrainingLayout(degree=8), RolloutLayout(degree=8, one_tensor=True))
    qkv = of_name(group.devices[5].rollout, "self_attn.qkv_proj.weight")
    k = [piece for piece in qkv.pieces if piece.part.endswith("k_proj.weight")]
    assert [(p.of, type(p.holding)) for p in k] == [
        ((4, 5), Refresh), ((5, 6), Alias), ((6, 7), Refresh), ((7, 8), Refresh)
    ]  # fmt: skip
    assert qkv.view is not None


def test_a_fused_parameter_of_the_finer_layout_is_row_ranges_or_rebuilt_for_an_engine_of_one_tensor() -> None:
    shape = small_shape()
    ranges = planned(shape, TrainingLayout(degree=1), RolloutLayout(degree=2)).devices[0]
    gate_up = of_name(ranges.rollout, "layers.0.mlp.gate_up_proj.weight")
    assert gate_up.view is None
    assert [(p.of, p.to, type(p.holding)) for p in gate_up.pieces] == [
        ((0, 8), (0, 8), Alias),
        ((0, 8), (8, 16), Alias),
    ]
    whole = planned(shape, TrainingLayout(degree=1), RolloutLayout(degree=2, one_tensor=True)).devices[0]
    gate_up = of_name(whole.rollout, "layers.0.mlp.gate_up_proj.weight")
    assert gate_up.view is not None
    assert gate_up.view.shape == (16, 6)
    reasons = [p.holding.why for p in gate_up.pieces if isinstance(p.holding, Rebuild)]
    assert reasons == ["2 row ranges do not make the one tensor that the engine takes"] * 2
    assert whole.storage.total_bytes > ranges.storage.total_bytes


def test_padding_that_training_does_not_split_makes_that_tensor_alone_rebuilt() -> None:
    shape = small_shape()  # vocabulary 70, padded to 128
    group = planned(shape, TrainingLayout(degree=2, padding_sharded=False), RolloutLayout(degree=2))
    embed = of_name(group.devices[1].rollout, "embed_tokens.weight")
    assert [(p.of, type(p.holding)) for p in embed.pieces] == [((64, 70), Rebuild), ((70, 128), Alias)]
    holding = embed.pieces[0].holding
    assert isinstance(holding, Rebuild)
    assert holding.why == (
        "padding: device 1 trains 35:70 of model.language_model.embed_tokens.weight and samples from 64:128; "
        "neither contains the other"
    )
    rebuilt = {p.name for d in group.devices for p in d.rollout for x in p.pieces if isinstance(x.holding, Rebuild)}
    vision = {"gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight"}
    assert rebuilt == {"model.embed_tokens.weight", *(f"visual.blocks.0.mlp.{name}" for name in vision)}


def test_a_whole_vision_tower_for_each_rollout_rank_is_refreshed_where_training_splits_it() -> None:
    shape = small_shape()
    group = planned(shape, TrainingLayout(degree=2), RolloutLayout(degree=2, vision_sharded=False))
    proj = of_name(group.devices[0].rollout, "visual.blocks.0.attn.proj.weight")
    assert proj.shape == (32, 32)
    assert [type(p.holding) for p in proj.pieces] == [Alias, Refresh]
    bias = of_name(group.devices[0].rollout, "visual.blocks.0.attn.proj.bias")
    assert [type(p.holding) for p in bias.pieces] == [Alias], "whole on every rank of both layouts"


def test_an_impossible_layout_is_refused_before_anything_is_planned() -> None:
    with pytest.raises(ConfigError, match="4 = 1 x 3 \\+ 1"):
        planned(small_shape(), TrainingLayout(degree=3), RolloutLayout(degree=4))
