"""Whole tensors put together from shards, in one process: what `test_ranks` sees from outside, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollplex.errors import ModelError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import DevicePlan, plan
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory.digest import digest
from rollplex.memory.tensors import hf_views, tensor, views
from rollplex.model.parallel.views import shard_views
from rollplex.model.parallel.weights import fill_shards
from rollplex.model.tensor_file import raw_bytes
from rollplex.model.weights import fill, save_folder
from rollplex.protocol.common import Kind
from rollplex_trainer.assembled import WholeTensors, arena_parts, whole_digest, write_weights
from support.segments import HostSegments
from support.tiny import write_model

Shards = list[tuple[DevicePlan, dict[str, Tensor]]]
DEGREES = [(4, 4), (2, 1), (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("four")
    write_model(made, kv_heads=4, tied=False)
    return made


@pytest.fixture(scope="module")
def table(folder: Path) -> ParameterTable:
    return parameter_table(read_shape(folder), dtype="float32", freeze_vision=False)


def filled(folder: Path, table: ParameterTable, training: int, rollout: int) -> Shards:
    """Of the devices of replica 0, over segments of NaN."""
    made = Shards()
    for device in plan(
        table, read_shape(folder), TrainingLayout(degree=training), RolloutLayout(degree=rollout)
    ).devices:
        if device.ranks.replica == 0:
            segment = torch.full((device.storage.total_bytes // 4,), float("nan"))
            shards = shard_views(segment, device.training)
            fill_shards(table, device.training, shards, folder)
            made.append((device, shards))
    return made


def whole_of(made: Shards) -> WholeTensors:
    return WholeTensors((device.training, shards) for device, shards in made)


@pytest.mark.parametrize(("training", "rollout"), DEGREES)
def test_shards_filled_by_slices_are_the_model_and_have_its_digest(
    folder: Path, table: ParameterTable, make_segments: Callable[[], HostSegments], training: int, rollout: int
) -> None:
    segments = make_segments()
    mapping = segments.attach(segments.create(Kind.ACTOR_WEIGHTS, table.total_bytes))
    one = views(mapping, table)
    fill(table, one, folder)
    whole = whole_of(filled(folder, table, training, rollout))
    for entry in table.entries:
        assert torch.equal(whole.stored(entry), one[entry.name]), entry.name
    for name, value in hf_views(one, table).items():
        assert torch.equal(whole.parameter(name, tuple(value.shape)), value), name
    assert whole_digest(table, whole) == digest(mapping, table)


@pytest.mark.parametrize(("training", "rollout"), DEGREES)
def test_files_of_weights_are_byte_for_byte_those_of_one_device(
    folder: Path, table: ParameterTable, tmp_path: Path, training: int, rollout: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex.model.weights.SHARD_BYTES", table.total_bytes // 3)
    whole = whole_of(filled(folder, table, training, rollout))
    one = {entry.name: torch.empty(entry.shape) for entry in table.entries}
    fill(table, one, folder)
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    save_folder(table, one, folder, tmp_path / "theirs")
    write_weights(table, whole, folder, tmp_path / "ours")
    files = {file.name: file.read_bytes() for file in (tmp_path / "theirs").iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    assert {file.name: file.read_bytes() for file in (tmp_path / "ours").iterdir()} == files


def test_parts_of_an_arena_follow_one_another_with_its_gaps(
    folder: Path, table: ParameterTable, make_segments: Callable[[], HostSegments]
) -> None:
    gradients, segments = gradient_table(table), make_segments()
    mapping = segments.attach(segments.create(Kind.GRADIENTS, gradients.total_bytes))
    fill(table, views(mapping, gradients), folder)
    arena = tensor(mapping, 0, (gradients.total_bytes // 4,), torch.float32)
    parts = list(arena_parts(gradients, whole_of(filled(folder, table, 4, 4))))
    assert b"".join(bytes(raw_bytes(part)) for part in parts) == bytes(raw_bytes(arena))


def test_a_folder_without_a_tensor_is_refused_before_anything_is_filled(table: ParameterTable, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        fill_shards(table, [], {}, tmp_path)
