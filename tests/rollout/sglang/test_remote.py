"""The connection about the weights: what crosses, and how each end fails."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from rollplex.errors import EngineError, ProtocolError, SegmentError, StateError, WaitError
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import views
from rollplex.protocol.common import Kind, Memory, Parallel
from rollplex_rollout.sglang import wire
from rollplex_rollout.sglang.places import places
from rollplex_rollout.sglang.remote import Door, RemoteMapping, RemoteWeights
from rollplex_rollout.sglang.serving import Taken, WeightsServer, take

if TYPE_CHECKING:
    from rollout.conftest import Node

VERSION = 5


def offer_of(node: Node, **changes: object) -> wire.Offer:
    values: dict[str, object] = {
        "memory": Memory.HOST,
        "size_bytes": node.actor.size_bytes,
        "path": str(node.folder),
        "dtype": "float32",
        "freeze_vision": False,
        "table_hash": node.table.hash,
        "never_sampled": (1, 2),
    }
    return wire.Offer(**{**values, **changes})  # type: ignore[arg-type]


class Pair:
    """Both ends, the scheduler's in a thread."""

    def __init__(self, node: Node, door: Door) -> None:
        self.node = node
        self.parameters: dict[str, Tensor] = {}
        self.failure: Exception | None = None
        self.taken: Taken | None = None
        self.lent: list[Mapping] = []
        self._thread = threading.Thread(target=self._scheduler, args=(door.path,), daemon=True)
        self._thread.start()
        self.remote = door.wait(10.0, lambda: None)

    def _scheduler(self, path: Path) -> None:
        try:
            self.taken = taken = take(path)
        except (SegmentError, StateError) as error:
            self.failure = error
            return
        self.parameters = views(taken.mapping, taken.table)
        offsets = {entry.name: entry.offset for entry in taken.table.entries}
        WeightsServer(taken, lambda: self.parameters, self.lent.append).start()
        wire.tell(taken.sock, wire.Mapped(offsets=offsets))

    def offer(self, **changes: object) -> dict[str, int]:
        fd = self.node.segments.descriptor(self.node.actor_ref)
        return self.remote.offer(offer_of(self.node, **changes), fd, 10.0)

    def mapping(self) -> RemoteMapping:
        return RemoteMapping(self.remote, self.node.actor.size_bytes, Memory.HOST)

    def end(self) -> None:
        """As if the scheduler process had died."""
        assert self.taken is not None
        self.taken.sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def pair(node: Node, tmp_path: Path) -> Iterator[Pair]:
    door = Door(tmp_path / "weights.sock")
    made = Pair(node, door)
    door.close()
    yield made
    made.remote.close()


def test_the_segment_crosses_and_the_header_is_read_through_the_other_process(pair: Pair) -> None:
    offsets = pair.offer()
    assert offsets == {entry.name: entry.offset for entry in pair.node.table.entries}
    page = HeaderPage(pair.mapping(), run_id=pair.node.segments.run_id, table_hash=pair.node.table.hash)
    assert page.require(VERSION).digest == digest(pair.node.actor, pair.node.table)
    pair.node.header.begin_update(VERSION)
    assert page.read().state.name == "UPDATING", "it is read anew each time"


def test_both_sides_compute_the_same_digest(pair: Pair) -> None:
    pair.offer()
    assert pair.remote.digest() == digest(pair.node.actor, pair.node.table)
    pair.node.parameter(pair.node.table.entries[1].name).add_(1)
    assert pair.remote.digest() == digest(pair.node.actor, pair.node.table)


def test_a_rank_is_told_its_places_and_digests_the_segment_of_its_device(pair: Pair) -> None:
    node, parallel = pair.node, Parallel(rollout=2, device=1, rank=1, meet="unused")
    rank = places(node.table, node.shape, parallel)
    ref = node.segments.create(Kind.ACTOR_WEIGHTS, rank.total_bytes)
    offer = offer_of(node, size_bytes=rank.total_bytes, parallel=parallel)
    pair.remote.offer(offer, node.segments.descriptor(ref), 10.0)
    assert pair.taken is not None
    assert pair.taken.places == rank
    mapping = node.segments.map_again(ref)
    mapping.write(rank.total_bytes - 8, b"the last")
    assert pair.remote.digest() == digest(mapping, node.table, rank.total_bytes)


def test_parameters_are_looked_at_as_they_are_now(pair: Pair) -> None:
    pair.offer()
    pair.remote.look()
    name = pair.node.table.entries[1].name
    pair.parameters[name] = pair.parameters[name].clone()
    with pytest.raises(SegmentError, match="storage of its own"):
        pair.remote.look()


def test_a_question_that_fails_is_answered_with_the_reason_and_the_next_one_as_ever(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the digest's scratch does where a GPU is full: the process lives, and must not be told dead."""
    pair.offer()

    def short(*_: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as full:
        full.setattr("rollplex_rollout.sglang.serving.digest", short)
        with pytest.raises(EngineError, match="could not answer.*got Digest: OutOfMemoryError: CUDA out of memory"):
            pair.remote.digest()
    assert pair.remote.digest() == digest(pair.node.actor, pair.node.table)


def test_a_scheduler_that_disagrees_about_the_table_says_so_at_both_ends(pair: Pair) -> None:
    with pytest.raises(StateError, match="disagree about the parameter table") as caught:
        pair.offer(table_hash="ab" * 32)
    assert caught.value.got == pair.node.table.hash
    assert caught.value.where == "SGLang's scheduler process"
    pair._thread.join(5)
    assert isinstance(pair.failure, StateError)


def test_a_segment_of_another_size_is_not_mapped(pair: Pair) -> None:
    with pytest.raises(SegmentError, match="another size"):
        pair.offer(size_bytes=pair.node.actor.size_bytes - 256)


def test_a_mapping_through_another_process_only_reads_and_only_a_little(pair: Pair) -> None:
    pair.offer()
    mapping = pair.mapping()
    calls: list[Callable[[], object]] = [
        lambda: mapping.buffer,
        lambda: mapping.view(0, 8),
        lambda: mapping.device_view(0, 8),
        lambda: mapping.write(0, b"x"),
        lambda: mapping.store_word(0, 1),
        mapping.clear,
        lambda: mapping.read(mapping.size_bytes - 4, 8),
        lambda: mapping.read(0, 2**20 + 1),
        lambda: mapping.load_word(4),
    ]
    for call in calls:
        with pytest.raises(SegmentError):
            call()
    assert mapping.read(100, 0) == b""
    mapping.close()
    with pytest.raises(SegmentError, match="after it was unmapped"):
        mapping.read(0, 8)


def test_the_end_of_the_scheduler_process_is_named(pair: Pair) -> None:
    pair.offer()
    pair.end()
    with pytest.raises(EngineError, match="scheduler process has ended"):
        pair.mapping().load_word(16)


def test_a_scheduler_process_that_does_not_come_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    door = Door(tmp_path / "weights.sock")
    looks: list[int] = []
    with pytest.raises(WaitError, match="did not come"):
        door.wait(0.1, lambda: looks.append(1))
    assert looks
    door.close()
    assert not (tmp_path / "weights.sock").exists()


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="too long a path"):
        Door(tmp_path / ("x" * 120))


def test_descriptors_do_not_stay_open_in_the_scheduler_process(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    pair.offer()
    after = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert after <= before + 2, "the fetched descriptor, and the one that Python's mmap makes for itself"


def test_a_units_inputs_cross_and_their_descriptor_does_not_stay_open(pair: Pair) -> None:
    pair.offer()
    node = pair.node
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    pair.remote.lend_inputs(node.segments.descriptor(node.inputs_ref), node.inputs.size_bytes)
    (mapping,) = pair.lent
    node.inputs.write(64, b"new")
    assert mapping.read(64, 3) == b"new"
    mapping.close()
    after = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert after <= before + 1, "the fetched descriptor"
    with pytest.raises(SegmentError, match="another size"):
        pair.remote.lend_inputs(node.segments.descriptor(node.inputs_ref), node.inputs.size_bytes - 8)
    with pytest.raises(ProtocolError, match="without their descriptor"):
        pair.remote.ask(wire.Inputs(size_bytes=8))
    pair.remote.look()


def test_an_offer_must_come_first_and_once(pair: Pair) -> None:
    pair.offer()
    with pytest.raises(Exception, match="offered twice"):
        pair.remote.ask(offer_of(pair.node))


def test_a_stranger_is_no_scheduler(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    wire.tell(theirs, wire.Fine())
    with pytest.raises(EngineError, match="another answer"):
        RemoteWeights(ours).offer(
            wire.Offer(
                memory=Memory.HOST,
                size_bytes=1,
                path="",
                dtype="float32",
                freeze_vision=False,
                table_hash="",
                never_sampled=(),
            ),
            0,
            1.0,
        )
    ours.close()
    theirs.close()
