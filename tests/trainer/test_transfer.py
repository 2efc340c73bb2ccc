"""One trainer that also fills a device which only samples: the order of copies and headers, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollplex.checkpoint.folder import read_manifest
from rollplex.errors import CheckpointError, SegmentError, StateError
from rollplex.memory.header import HeaderPage, State
from rollplex.memory.tensors import views
from rollplex.protocol.common import DigestRequest
from rollplex.protocol.trainer import KeepGradients, Restore, SaveCheckpoint
from rollplex_trainer.transfer import Destination
from support.rank_trainers import Node, RankWorld
from support.tiny import write_model
from support.trainer import World, apply, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("alone")
    write_model(made / "model", kv_heads=4)
    return made


def node_of(folder: Path) -> Node:
    return Node(folder, {"number": 0, "training": 1, "rollout": 1, "target": 1, "dtype": "float32", "frozen": True}, 1)


@pytest.fixture
def world(folder: Path) -> Iterator[RankWorld]:
    node = node_of(folder)
    yield RankWorld(node, 0, None)
    node.segments.close()


def target(world: RankWorld, number: int = 0) -> tuple[HeaderPage, dict[str, Any]]:
    mapping = world.segments.map_again(world.node.targets[number].actor)
    header = HeaderPage(mapping, run_id=world.segments.run_id, table_hash=world.table.hash)
    return header, dict(views(mapping, world.table))


def test_targets_have_the_weights_and_the_version_of_each_update(world: RankWorld) -> None:
    header, copy = target(world)
    with pytest.raises(SegmentError, match="does not hold weights"):
        header.read()
    first = world.publish(0)
    own = dict(views(world.pages, world.table))
    total = sum(entry.size_bytes for entry in world.table.entries)
    trained = sum(entry.size_bytes for entry in world.table.trainable_entries)
    assert (first.refreshed_bytes, first.rebuilt_bytes) == (0, 2 * total), "two targets, frozen weights too"
    assert header.require(0).digest == first.digest == world.header.require(0).digest

    world.train(0)
    assert prepare(world).finite
    apply(world)
    for page in (world.header, header):
        assert (page.read().state, page.read().version) == (State.UPDATING, 0), "nobody samples meanwhile"
    second = world.publish(1)
    assert second.rebuilt_bytes == 2 * trained
    assert second.digest != first.digest
    assert header.require(1).digest == second.digest == world.send(DigestRequest(cause=2)).digest
    assert all(torch.equal(own[name], copy[name]) for name in own)


def test_one_device_that_trains_stores_what_it_stores_alone(
    world: RankWorld, folder: Path, make_world: Callable[..., World]
) -> None:
    alone = make_world(folder=folder / "model", freeze_vision=True, optimizer={"eps": 1e-3})
    world.publish(0)
    assert world.header.require(0).digest == alone.header.require(0).digest


def test_what_was_not_stepped_is_not_published(world: RankWorld) -> None:
    with pytest.raises(StateError, match="got 3; needed 0"):
        world.publish(3)
    world.publish(0)
    with pytest.raises(StateError, match="got version 0, STABLE; needed version 0, UPDATING"):
        world.publish(1)
    assert world.header.require(0).state is State.STABLE, "nothing was touched"
    world.train(0)
    with pytest.raises(StateError, match="Publish inside a step"):
        world.publish(1)


def test_a_copy_that_fails_poisons_this_devices_weights_and_the_targets(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(0)
    world.train(0)
    prepare(world)
    apply(world)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a copy")

    monkeypatch.setattr(Destination, "fill", broken)
    with pytest.raises(RuntimeError, match="a copy"):
        world.publish(1)
    for page in (world.header, target(world)[0], target(world, 1)[0]):
        assert page.read().state is State.POISONED


def test_a_checkpoint_with_other_weights_than_it_says_is_not_published(
    world: RankWorld, folder: Path, tmp_path: Path
) -> None:
    world.publish(0)
    saved = tmp_path / "step_4"
    world.send(SaveCheckpoint(cause=1, step=4, version=0, folder=str(saved), state_json="{}"))
    digest = read_manifest(saved).identity.digest
    assert digest == world.header.require(0).digest
    right = RankWorld(node_of(folder), 0, Restore(folder=str(saved), version=4, digest=digest))
    assert right.publish(4).digest == digest
    wrong = RankWorld(node_of(folder), 0, Restore(folder=str(saved), version=4, digest="00" * 32))
    with pytest.raises(CheckpointError, match="holds other weights than its manifest says"):
        wrong.publish(4)
    with pytest.raises(SegmentError, match="does not hold weights"):
        wrong.header.read()


def test_only_the_leader_writes_files(world: RankWorld, tmp_path: Path) -> None:
    world.publish(0)
    monkey: Any = world.ready
    monkey._leader = None
    world.train(0)
    prepare(world)
    for message in (
        KeepGradients(cause=1, step=0, file=str(tmp_path / "gradients")),
        SaveCheckpoint(cause=1, step=0, version=0, folder=str(tmp_path / "step_0"), state_json="{}"),
    ):
        with pytest.raises(StateError, match="needed rank 0 of replica 0"):
            world.send(message)


def test_a_trainer_without_a_unit_leaves_out_what_the_prefix_arena_has_of_an_earlier_step(world: RankWorld) -> None:
    """Of several replicas some may have no prompts in a step; they vote all the same."""
    world.publish(0)
    for gradient in world.prefix_gradients.values():
        gradient.fill_(1.0)
    vote = prepare(world)
    assert not world.ready.arena.any()
    assert vote.metrics["grad_norm"] == 0.0
