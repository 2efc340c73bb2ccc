"""Nothing of the trainer service mixes tensors of the host with those of its device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.protocol.common import DigestRequest
from rollplex.protocol.trainer import Loss, SaveCheckpoint
from rollplex_trainer.service import TrainerService
from support.on_device import put_on_device
from support.trainer import World, apply, prepare, sampled, train_all, whole_message

MakeWorld = Callable[..., World]


@pytest.mark.parametrize(
    ("dtype", "loss", "packed"),
    [("float32", Loss.GRPO, False), ("bfloat16", Loss.DAPO, True), ("float32", Loss.GSPO, True)],
)
def test_a_whole_step_runs_on_the_device(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, loss: Loss, packed: bool
) -> None:
    monkeypatch.setattr("rollplex.model.suffix.packs_suffix", lambda *_, **__: packed)
    devices = put_on_device(monkeypatch, TrainerService)
    world = make_world(dtype=dtype, algorithm={"loss": loss})
    train_all(world, [sampled(n) for n in range(3)], (2, 1))
    assert devices.seen > 100
    assert prepare(world).finite
    apply(world)
    world.send(DigestRequest(cause=3))
    folder = tmp_path / "checkpoint"
    world.send(SaveCheckpoint(cause=4, step=1, version=1, folder=str(folder), state_json="{}"))
    assert (folder / "model.safetensors").stat().st_size


def test_whole_sequences_run_on_the_device(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = put_on_device(monkeypatch, TrainerService)
    world = make_world()
    before = devices.seen
    world.send(whole_message(world, [sampled(n) for n in range(3)]))
    assert devices.seen > before + 100
    assert prepare(world).finite
