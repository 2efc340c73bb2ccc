"""LoadTrainer over what an earlier trainer left: the same numbers as if it had never ended, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rollplex.errors import SegmentError, StaleWeightsError
from rollplex.memory.header import State
from rollplex.protocol.trainer import LoadTrainer, Standing
from rollplex_trainer import ready
from rollplex_trainer.service import TrainerService
from support.segments import HostSegments
from support.trainer import Sampled, World, apply, prepare, train_all

MakeWorld = Callable[..., World]


def update(world: World, groups: list[Sampled], version: int) -> str:
    train_all(world, groups, version=version)
    prepare(world, version)
    return str(apply(world, version).digest)


def replaced(world: World, standing: Standing) -> TrainerService:
    """Another trainer over the same segments takes the place of the world's."""
    world.load = replace(world.load, standing=standing)
    world.service = TrainerService(world.segments)
    world.send(world.load)
    return world.service


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9}, {"streamed": True}])
def test_a_step_that_was_begun_is_done_again_with_its_bits_and_so_are_all_later_ones(
    make_world: MakeWorld, groups: list[Sampled], dtype: str, optimizer: dict[str, Any]
) -> None:
    settings = {"lr": 0.01, "warmup_steps": 3, **optimizer}
    plain, world = make_world(dtype, optimizer=settings), make_world(dtype, optimizer=settings)
    digests = [update(plain, groups, version) for version in range(4)]
    assert [update(world, groups, version) for version in range(2)] == digests[:2]
    train_all(world, groups[:1], split=(1,), version=2)  # and then it died
    replaced(world, Standing(version=2, digest=digests[1]))
    assert not any(gradient.any() for gradient in world.gradients.values())
    assert [update(world, groups, version) for version in (2, 3)] == digests[2:]


def test_a_step_that_was_voted_on_is_done_again_too(make_world: MakeWorld, groups: list[Sampled]) -> None:
    plain, world = make_world(), make_world()
    expected = update(plain, groups, 0)
    train_all(world, groups)
    prepare(world)
    replaced(world, Standing(version=0, digest=world.header.read().digest))
    assert update(world, groups, 0) == expected


def test_what_loading_answers_is_the_digest_that_another_trainer_is_told(make_world: MakeWorld) -> None:
    world = make_world()
    answers: list[Any] = []
    TrainerService(world.segments).handle(
        replace(world.load, standing=Standing(version=0, digest=world.header.read().digest)), answers.append
    )
    assert answers[0].digest == world.header.read().digest


def test_the_reference_stays_that_of_the_beginning(make_world: MakeWorld, groups: list[Sampled]) -> None:
    world = make_world()
    reference = world.load.reference
    assert reference is not None
    before = world.segments.map_again(reference).read(0, reference.size_bytes)
    digest = update(world, groups, 0)
    replaced(world, Standing(version=1, digest=digest))
    assert world.segments.map_again(reference).read(0, reference.size_bytes) == before


def test_weights_that_changed_since_their_digest_was_told_are_refused(
    make_world: MakeWorld, groups: list[Sampled]
) -> None:
    world = make_world()
    digest = update(world, groups, 0)
    next(iter(world.weights.values())).view(-1)[0] += 1.0
    with pytest.raises(
        StaleWeightsError, match=f"not those of the last update.*needed {digest}, of version 1.*--resume"
    ):
        replaced(world, Standing(version=1, digest=digest))


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"streamed": True}])
def test_master_weights_that_do_not_round_to_the_weights_are_refused(
    make_world: MakeWorld, groups: list[Sampled], optimizer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "CHUNK_BYTES", 1000)
    world = make_world("bfloat16", optimizer={"lr": 0.01, **optimizer})
    digest = update(world, groups, 0)
    replaced(world, Standing(version=1, digest=digest))
    name, master = list(world.service._ready.optimizer._state.states["master"].items())[-1]
    master[-1] += 1.0
    with pytest.raises(StaleWeightsError, match=f"{name}.*not that of the weights; got master weights"):
        replaced(world, Standing(version=1, digest=digest))


@pytest.mark.parametrize("state", [State.UPDATING, State.POISONED])
def test_weights_that_an_update_was_in_are_refused(make_world: MakeWorld, state: State) -> None:
    world = make_world()
    digest = world.header.read().digest
    if state is State.UPDATING:
        world.header.begin_update(0)
    else:
        world.header.poison()
    with pytest.raises(StaleWeightsError, match=state.name):
        replaced(world, Standing(version=0, digest=digest))


def test_weights_of_another_version_are_refused(make_world: MakeWorld) -> None:
    world = make_world()
    with pytest.raises(StaleWeightsError, match="got version 0, STABLE; needed version 3"):
        replaced(world, Standing(version=3, digest=world.header.read().digest))


def test_segments_that_nobody_filled_are_refused(make_world: MakeWorld) -> None:
    world = make_world()
    segments = HostSegments()
    fresh = {
        name: segments.create(ref.kind, ref.size_bytes)
        for name in ("actor", "reference", "gradients", "prefix_gradients", "optimizer_state")
        if (ref := getattr(world.load, name)) is not None
    }
    message: LoadTrainer = replace(world.load, standing=Standing(version=0, digest="0" * 64), **fresh)
    with pytest.raises(SegmentError, match="does not hold weights"):
        TrainerService(segments).handle(message, lambda _: None)
    segments.close()
