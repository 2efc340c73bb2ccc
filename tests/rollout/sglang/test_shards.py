"""The shard rules of rollout layouts against the layers of the real SGLang, filled by their own weight loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rollplex.layout.parallel.degrees import RolloutLayout
from rollplex.protocol.common import Memory
from support.live_sglang import kernels, unavailable
from support.slices import DEGREES, full_model, sampled, small_shape

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
    pytest.mark.filterwarnings("default"),  # SGLang's own, at its import
]
SHAPE = small_shape()
MODEL = full_model(SHAPE, "bfloat16")
TEXT, VISION = "model.language_model.layers.0", "model.visual.blocks.0"


@pytest.fixture(scope="module")
def layers() -> Iterator[Any]:
    """sglang.srt.layers.linear."""
    with kernels(Memory.HOST):
        from sglang.srt.layers import linear

        yield linear


def bf16(name: str) -> torch.Tensor:
    return torch.from_numpy(MODEL[name].view(np.int16)).view(torch.bfloat16)


def check(parameter: Any, name: str, degree: int, rank: int) -> None:
    expected = sampled(MODEL, SHAPE, RolloutLayout(degree=degree), rank)[name]
    assert np.array_equal(parameter.data.view(torch.int16).numpy().view(np.uint16), expected)


def made(kind: Any, *sizes: Any, **options: Any) -> Any:
    layer = kind(*sizes, params_dtype=torch.bfloat16, **options)
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    return layer


@pytest.mark.parametrize("degree", DEGREES)
def test_qkv_of_a_rank_is_q_k_v_with_heads_that_ranks_share(layers: Any, degree: int) -> None:
    for rank in range(degree):
        sizes = (SHAPE.hidden, SHAPE.head_dim, SHAPE.heads, SHAPE.kv_heads)
        layer = made(layers.QKVParallelLinear, *sizes, bias=True, tp_rank=rank, tp_size=degree)
        for kind in ("weight", "bias"):
            parameter = getattr(layer, kind)
            for head in "qkv":
                parameter.weight_loader(parameter, bf16(f"{TEXT}.self_attn.{head}_proj.{kind}"), head)
            check(parameter, f"model.layers.0.self_attn.qkv_proj.{kind}", degree, rank)


@pytest.mark.parametrize("degree", DEGREES)
def test_gate_and_up_of_a_rank_follow_each_other_and_down_is_cut_by_columns(layers: Any, degree: int) -> None:
    for rank in range(degree):
        ranks = {"tp_rank": rank, "tp_size": degree}
        sizes = (SHAPE.hidden, [SHAPE.intermediate] * 2)
        gate_up = made(layers.MergedColumnParallelLinear, *sizes, bias=False, **ranks)
        for number, part in enumerate(("gate", "up")):
            gate_up.weight.weight_loader(gate_up.weight, bf16(f"{TEXT}.mlp.{part}_proj.weight"), number)
        check(gate_up.weight, "model.layers.0.mlp.gate_up_proj.weight", degree, rank)
        down = made(layers.RowParallelLinear, SHAPE.intermediate, SHAPE.hidden, bias=False, **ranks)
        down.weight.weight_loader(down.weight, bf16(f"{TEXT}.mlp.down_proj.weight"))
        check(down.weight, "model.layers.0.mlp.down_proj.weight", degree, rank)


@pytest.mark.parametrize("degree", DEGREES)
def test_the_bias_of_a_layer_cut_by_columns_is_whole_on_every_rank(layers: Any, degree: int) -> None:
    hidden = SHAPE.vision.hidden
    for rank in range(degree):
        proj = made(layers.RowParallelLinear, hidden, hidden, bias=True, tp_rank=rank, tp_size=degree)
        for kind in ("weight", "bias"):
            parameter = getattr(proj, kind)
            parameter.weight_loader(parameter, bf16(f"{VISION}.attn.proj.{kind}"))
            check(parameter, f"visual.blocks.0.attn.proj.{kind}", degree, rank)
