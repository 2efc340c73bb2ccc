"""Prefix and trainer services over segments of a GPU, in one process: what they leave against what hosts leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollplex.memory.digest import digest
from rollplex.protocol.common import DigestRequest, Kind, LeaseRef, Memory, Responses
from rollplex.protocol.prefix import Activations, Which
from rollplex.protocol.trainer import SaveCheckpoint
from support import prefix as prefix_side
from support import trainer as trainer_side
from support.segments import HostSegments
from support.tiny import FILM, PICTURE, PICTURES, WORDS, Prompt, make_prompts, write_model

pytestmark = pytest.mark.gpu

ALL = (0, 1, 2, 3)
LENGTHS = ((4, 1, 6), (2, 5, 3), (6, 6, 1), (1, 1, 1))
WORKSPACE = LeaseRef(lease=77, kind=Kind.WORKSPACE, size_bytes=2**24)


@pytest.fixture(autouse=True, scope="module")
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, seed in (("actor", 3), ("reference", 4)):
        write_model(root / name, seed=seed, wide=True)
    return root / "actor", root / "reference"


@pytest.fixture(scope="module")
def prompts(folders: tuple[Path, Path]) -> list[Prompt]:
    return make_prompts(folders[0], (PICTURE, WORDS, PICTURES, FILM))


@pytest.fixture
def prefix_world(folders: tuple[Path, Path], prompts: list[Prompt]) -> Callable[..., prefix_side.World]:
    return lambda memory, **changes: prefix_side.World(*folders, prompts, memory=memory, **changes)


def responses() -> list[Responses]:
    made = []
    for group, lengths in enumerate(LENGTHS):
        tokens = np.random.Generator(np.random.Philox(group)).integers(0, 60, sum(lengths))
        made.append(Responses(group=group, lengths=lengths, tokens=tokens.astype("<i4").tobytes()))
    return made


def near(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = (t.detach().to("cpu", torch.float64) for t in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def _with_gradients(world: prefix_side.World, unit: int) -> list[Tensor]:
    """Give a unit's K and V gradients; what its segment holds, copied: no view of it stays."""
    kv = world.unit_views(unit)
    segment = [t.detach().clone() for t in (*kv.keys, *kv.values, kv.last_hidden)]
    kv.gradients.zero_()
    for number, gradient in enumerate((*kv.d_keys, *kv.d_values, kv.d_last_hidden)):
        draw = torch.Generator().manual_seed(number)
        gradient.copy_(torch.randn(gradient.shape, generator=draw))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return segment


def step(world: prefix_side.World, activations: Activations) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    """What one step leaves: the segment, the arena, the scores."""
    world.forward(Which.REFERENCE, ALL, 0)
    keep = activations is not Activations.RECOMPUTE
    given = {"activations": activations} | ({} if keep else {"lease": None})
    world.forward(Which.ACTOR, ALL, 1, **given)
    scored = world.score(0, responses(), release=True)
    segment = _with_gradients(world, 1)
    world.backward(1, workspace=None if keep else WORKSPACE)
    return segment, {name: value.clone() for name, value in world.gradients.items()}, scored.logprobs


def test_the_prefix_service_leaves_what_it_leaves_on_a_host(prefix_world: Callable[..., prefix_side.World]) -> None:
    ours, theirs = (step(prefix_world(memory), Activations.KEEP) for memory in (Memory.CUDA, Memory.HOST))
    assert all(near(one, other) < 1e-5 for one, other in zip(ours[0], theirs[0], strict=True))
    floor = 1e-4 * max(float(value.norm()) for value in theirs[1].values())
    worst = {n: near(ours[1][n], v) for n, v in theirs[1].items() if float(v.norm()) > floor}
    assert max(worst.values()) < 5e-5, worst
    for one, other in zip(ours[2], theirs[2], strict=True):
        assert np.frombuffer(one.values, "<f8") == pytest.approx(np.frombuffer(other.values, "<f8"), abs=1e-4)


@pytest.mark.parametrize("way", [Activations.RECOMPUTE, Activations.LAYERS])
def test_a_recomputed_prefix_leaves_the_same_bits(
    prefix_world: Callable[..., prefix_side.World], way: Activations
) -> None:
    kept, again = (step(prefix_world(Memory.CUDA, dtype="bfloat16"), each) for each in (Activations.KEEP, way))
    assert all(torch.equal(one, other) for one, other in zip(kept[0], again[0], strict=True))
    assert all(torch.equal(again[1][name], value) for name, value in kept[1].items())


@pytest.fixture
def trainer_world(folders: tuple[Path, Path]) -> Iterator[Callable[..., trainer_side.World]]:
    prompts = make_prompts(folders[0], trainer_side.PROMPTS)
    made: list[HostSegments] = []

    def make(memory: Memory, dtype: str) -> trainer_side.World:
        made.append(HostSegments(memory))
        return trainer_side.World(folders[0], prompts, made[-1], dtype, memory=memory)

    yield make
    for segments in made:
        segments.close()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 8e-2)])
def test_the_trainer_makes_the_hosts_gradients_and_its_update_is_everywhere(
    trainer_world: Callable[..., trainer_side.World], tmp_path: Path, dtype: str, bound: float
) -> None:
    groups = [trainer_side.sampled(number) for number in range(3)]
    host, gpu = trainer_world(Memory.HOST, "float32"), trainer_world(Memory.CUDA, dtype)
    for world in (host, gpu):
        trainer_side.train_all(world, groups, (2, 1))
    torch.cuda.synchronize()
    assert near(*(torch.cat([g.flatten() for g in w.gradients.values()]).cpu() for w in (gpu, host))) < bound
    votes = [trainer_side.prepare(world) for world in (gpu, host)]
    assert votes[0].finite
    assert votes[0].metrics["grad_norm"] == pytest.approx(votes[1].metrics["grad_norm"], rel=max(bound, 1e-4))
    before = digest(gpu.segments.map_again(gpu.load.actor), gpu.table)
    applied = trainer_side.apply(gpu)
    assert applied.digest != before
    assert applied.digest == digest(gpu.segments.map_again(gpu.load.actor), gpu.table)
    assert gpu.send(DigestRequest(cause=3)).digest == applied.digest
    folder = tmp_path / "checkpoint"
    gpu.send(SaveCheckpoint(cause=4, step=1, version=1, folder=str(folder), state_json="{}"))
    assert (folder / "training" / "optimizer.safetensors").stat().st_size > 0
