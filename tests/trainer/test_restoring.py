"""LoadTrainer with a checkpoint: the same numbers as without the interruption, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollplex.checkpoint.folder import verify
from rollplex.errors import CheckpointError
from rollplex.protocol.trainer import Restore, SaveCheckpoint
from support.trainer import Sampled, World, apply, prepare, train_all

MakeWorld = Callable[..., World]
STATE = "training/optimizer.safetensors"


def _update(world: World, groups: list[Sampled], version: int) -> str:
    train_all(world, groups, version=version)
    prepare(world, version)
    return str(apply(world, version).digest)


def _save(world: World, folder: Path, version: int) -> Restore:
    world.send(SaveCheckpoint(cause=3, step=version, version=version, folder=str(folder), state_json="{}"))
    return Restore(folder=str(folder), version=version, digest=verify(folder).identity.digest)


def _again(world: World, restore: Restore, dtype: str = "float32", **changes: Any) -> World:
    """Another process on the same model folder."""
    return type(world)(world.folder, world.prompts, type(world.segments)(), dtype, restore=restore, **changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9}])
def test_updates_after_a_restoration_have_the_bits_of_updates_without_it(
    make_world: MakeWorld, groups: list[Sampled], tmp_path: Path, dtype: str, optimizer: dict[str, Any]
) -> None:
    settings = {"lr": 0.01, "warmup_steps": 3, **optimizer}
    world = make_world(dtype, optimizer=settings)
    _update(world, groups, 0)
    _update(world, groups, 1)
    restore = _save(world, tmp_path / "step_2", 2)
    second = _again(world, restore, dtype, optimizer=settings)
    assert second.header.require(2).digest == restore.digest
    assert [_update(second, groups, n) for n in (2, 3)] == [_update(world, groups, n) for n in (2, 3)]


def test_the_reference_stays_that_of_the_model_folder(
    make_world: MakeWorld, groups: list[Sampled], tmp_path: Path
) -> None:
    world = make_world()
    reference = world.load.reference
    assert reference is not None
    before = world.segments.map_again(reference).read(0, reference.size_bytes)
    _update(world, groups, 0)
    second = _again(world, _save(world, tmp_path / "step_1", 1))
    again = second.load.reference
    assert again is not None
    assert second.segments.map_again(again).read(0, again.size_bytes) == before


def _refused(world: World, restore: Restore, text: str, **changes: Any) -> None:
    with pytest.raises(CheckpointError, match=text):
        _again(world, restore, **changes)


def test_a_checkpoint_that_does_not_fit_is_refused(
    make_world: MakeWorld, groups: list[Sampled], tmp_path: Path
) -> None:
    world = make_world()
    _update(world, groups, 0)
    restore = _save(world, tmp_path / "step_1", 1)
    _refused(world, msgspec.structs.replace(restore, digest="other"), "holds other weights than its manifest says")
    _refused(world, restore, "state of adamw; needed state of sgd", optimizer={"name": "sgd", "momentum": 0.9})
    state = load_file(tmp_path / "step_1" / STATE)
    first = min(name for name in state if name.startswith("exp_avg."))
    for change, text in (
        ({first: None}, "only here or only in this run"),
        ({"surplus": torch.zeros(1)}, "only here or only in this run"),
        ({first: state[first].double()}, r"F64; needed \[\d+, \d+\] F32"),
        ({first: state[first][:1].clone()}, f"{first}: "),
    ):
        changed = {name: value for name, value in {**state, **change}.items() if value is not None}
        save_file(changed, tmp_path / "step_1" / STATE, metadata={"optimizer": "adamw"})
        _refused(world, restore, text)
    (tmp_path / "step_1" / STATE).write_bytes(b"torn")
    _refused(world, restore, "needed a whole file")
