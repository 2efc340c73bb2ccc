"""Leases with segments behind them: what is granted, waited for, measured, and given back."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollplex.errors import BudgetError, StateError
from rollplex.journal.events import LeaseGranted, LeaseReleased, LeaseWaiting
from rollplex.journal.phases import Phase
from rollplex.memory.segment import backend
from rollplex.protocol.common import HOST_INDEX, Device, Held, Kind, LeaseRef, Role
from rollplex.protocol.common import Memory as MemoryKind
from rollplex_coordinator.decisions.ledger import Ledger, Reservation
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.memory.leasing import Blocks, Memory, Want
from rollplex_coordinator.memory.observers import Observers
from rollplex_coordinator.records.record import Record
from support.core import DEVICE, FakeJournal

PAGE = 4096
BUDGET = 10 * PAGE


def want(pages: int, purpose: str = "a block", **changes: Any) -> Want:
    given: dict[str, Any] = {
        "kind": Kind.ACTOR_PREFIX_KV,
        "size_bytes": pages * PAGE,
        "owner": Role.PREFIX,
        "last_consumer": Role.TRAINER,
        "first": Phase.ROLLOUT,
        "last": Phase.TRAIN,
        "purpose": purpose,
    }
    return Want(**{**given, **changes})


class World:
    """A memory of ten pages, and its journal."""

    def __init__(self, run_dir: Path) -> None:
        self.journal = FakeJournal([])
        self.record = Record(run_dir, self.journal)  # type: ignore[arg-type] # has what Record uses of a journal
        self.holder = Holder(backend("host"))
        self.ledger = Ledger({DEVICE: BUDGET})
        self.memory = Memory(self.ledger, self.holder, self.record, DEVICE)
        self.memory.enter(Phase.ROLLOUT)

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.journal.events if isinstance(event, kind)]

    def close(self) -> None:
        self.holder.close_all()
        self.record.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_a_private_block_is_a_lease_and_a_segment_is_one_with_a_descriptor_of_exactly_its_size(world: World) -> None:
    private = world.memory.now(want(2, "scratch"))
    shared = world.memory.now(want(3, "a segment", segment=True))
    assert private.segment is None
    assert private.private == LeaseRef(lease=private.lease, kind=Kind.ACTOR_PREFIX_KV, size_bytes=2 * PAGE)
    with pytest.raises(AssertionError, match="scratch is private memory"):
        _ = private.ref
    held = world.holder.find(shared.ref.segment)
    assert held is not None
    assert (held.ref, held.lease, os.fstat(held.fd).st_size) == (shared.ref, shared.lease, 3 * PAGE)
    assert world.memory.segment_of(shared.lease) == shared.ref.segment
    assert world.memory.segment_of(private.lease) is None
    assert world.memory.audit() == {shared.lease: (3 * PAGE, 3 * PAGE)}
    granted = world.events(LeaseGranted)
    assert [(e.lease, e.size_bytes, e.segment) for e in granted] == [
        (private.lease, 2 * PAGE, None),
        (shared.lease, 3 * PAGE, shared.ref.segment),
    ]
    assert (granted[0].owner, granted[0].last_consumer) == (Role.PREFIX, Role.TRAINER)
    world.memory.release(shared)
    assert world.holder.find(shared.ref.segment) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held.fd)
    assert [lease.id for lease in world.memory.view().devices[0].leases] == [private.lease]


def test_a_block_that_must_fit_now_and_does_not_shows_the_table(world: World) -> None:
    world.memory.now(want(8, "the big one"))
    with pytest.raises(BudgetError, match=r"no memory for the small one(.|\n)*the big one"):
        world.memory.now(want(3, "the small one"))


def test_a_reservation_is_always_there_and_what_is_larger_is_refused(world: World) -> None:
    phases = frozenset({Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN})
    world.ledger.reserve(Reservation(name="scratch", device=DEVICE, size_bytes=4 * PAGE, phases=phases))
    world.memory.now(want(6))
    block = world.memory.now(want(4, reservation="scratch"))
    with pytest.raises(BudgetError, match="from scratch"):
        world.memory.now(want(1, reservation="scratch"))
    world.memory.release(block)
    world.memory.now(want(1, reservation="scratch"))


def test_blocks_that_fit_are_given_at_once_and_all_together(world: World) -> None:
    given: list[tuple[Blocks, ...]] = []
    world.memory.when_free((want(2), want(3, segment=True)), given.append)
    assert [[block.want.size_bytes for block in blocks] for blocks in given] == [[2 * PAGE, 3 * PAGE]]
    assert not world.events(LeaseWaiting)


def test_blocks_that_do_not_fit_wait_in_turn_and_are_given_when_memory_comes_back(world: World) -> None:
    order: list[str] = []

    def named(name: str) -> Any:
        return lambda blocks: order.append(f"{name}:{len(blocks)}")

    first = world.memory.now(want(6))
    world.memory.when_free((want(3, "second"), want(3, "second too")), named("second"))
    world.memory.when_free((want(1, "third"),), named("third"))
    assert order == [], "who comes later does not pass"
    assert [(e.size_bytes, e.free_bytes) for e in world.events(LeaseWaiting)] == [
        (3 * PAGE, 4 * PAGE),
        (3 * PAGE, 4 * PAGE),
        (PAGE, 4 * PAGE),
    ]
    world.memory.release(first)
    assert order == ["second:2", "third:1"]
    assert len(world.events(LeaseGranted)) == 4


def test_a_later_phase_gives_out_what_was_kept_free_for_an_earlier_one(world: World) -> None:
    world.ledger.reserve(
        Reservation(name="rollout", device=DEVICE, size_bytes=6 * PAGE, phases=frozenset({Phase.ROLLOUT}))
    )
    given: list[tuple[Blocks, ...]] = []
    world.memory.now(want(2))
    world.memory.when_free((want(3),), given.append)
    assert not given
    world.memory.enter(Phase.SCORE)
    assert len(given) == 1


def test_whoever_is_served_may_ask_and_give_back_at_once(world: World) -> None:
    order: list[str] = []

    def second(blocks: tuple[Blocks, ...]) -> None:
        order.append("second")
        world.memory.when_free((want(9, "third"),), lambda _: order.append("third"))
        world.memory.release(blocks[0])

    first = world.memory.now(want(6))
    world.memory.when_free((want(6, "second"),), second)
    world.memory.release(first)
    assert order == ["second", "third"]
    world.ledger.check_integrity()


def test_what_can_never_fit_is_refused_at_once(world: World) -> None:
    with pytest.raises(BudgetError, match="too big cannot fit"):
        world.memory.when_free((want(11, "too big"),), lambda _: None)
    assert not world.events(LeaseWaiting)


def test_what_was_held_at_most_is_told_when_the_lease_ends(world: World) -> None:
    block, silent = world.memory.now(want(2)), world.memory.now(want(1))
    assert world.memory.held_bytes(block.lease) is None
    for size_bytes in (700, 900, 800):
        world.memory.measured((Held(lease=block.lease, size_bytes=size_bytes),))
    assert world.memory.held_bytes(block.lease) == 900
    world.memory.release(block)
    world.memory.release(silent)
    assert [(e.lease, e.held_bytes) for e in world.events(LeaseReleased)] == [(block.lease, 900), (silent.lease, None)]
    assert world.memory.held_bytes(block.lease) is None


def test_a_segment_of_another_size_than_its_lease_is_found_at_the_next_phase(world: World) -> None:
    block = world.memory.now(want(2, segment=True))
    held = world.holder._segments[block.ref.segment]
    smaller = backend("host").create(PAGE, "test")
    os.dup2(smaller, held.fd)
    os.close(smaller)
    assert world.memory.audit() == {block.lease: (2 * PAGE, PAGE)}
    with pytest.raises(StateError, match=f"segments and leases disagree; got .*{2 * PAGE}, {PAGE}"):
        world.memory.enter(Phase.SCORE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_segments_are_within_leases_and_leases_within_the_budget_after_any_history(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    world = World(tmp_path)
    held: list[Blocks] = []
    try:
        for _ in range(40):
            if held and rng.random() < 0.45:
                world.memory.release(held.pop(rng.randrange(len(held))))
            else:
                wants = tuple(want(rng.randint(1, 5), segment=rng.random() < 0.5) for _ in range(rng.randint(1, 2)))
                world.memory.when_free(wants, held.extend)
            world.ledger.check_integrity()
            assert all(leased == real for leased, real in world.memory.audit().values())
            segments = {block.lease for block in held if block.segment is not None}
            assert set(world.holder.measured()) == segments
            assert sum(block.want.size_bytes for block in held) == world.memory.view().devices[0].held_bytes <= BUDGET
        while held:
            world.memory.release(held.pop())
        assert len(world.events(LeaseGranted)) == len(world.events(LeaseReleased)) > 0
        assert not world.memory.view().devices[0].waiting
    finally:
        world.close()


class Watched:
    """What is asked of an observer."""

    def __init__(self) -> None:
        self.entered: list[tuple[Phase, int | None, dict[str, int]]] = []

    def enter(self, phase: Phase, step: int | None, held: dict[str, int]) -> None:
        self.entered.append((phase, step, held))


def test_the_books_of_the_device_follow_every_grant_and_release(world: World) -> None:
    assert world.memory.leased().total_bytes == 0
    private, shared = world.memory.now(want(2)), world.memory.now(want(3, segment=True))
    world.memory.now(want(1, owner=Role.TRAINER))
    before = world.memory.leased()
    assert before.segments_bytes == 3 * PAGE
    assert before.private == ((Role.PREFIX, 2 * PAGE), (Role.TRAINER, PAGE))
    world.memory.release(private)
    world.memory.release(shared)
    kept = ((Role.PREFIX, 2 * PAGE), (Role.TRAINER, PAGE))
    assert (world.memory.leased().segments_bytes, world.memory.leased().private) == (0, kept), "an allocator keeps it"
    world.memory.trimmed(Role.PREFIX)
    assert world.memory.leased().private == ((Role.TRAINER, PAGE),)
    assert before.segments_bytes == 3 * PAGE, "whoever read it keeps what it read"


def test_an_allocator_is_taken_to_hold_the_most_that_it_was_leased_at_once_and_what_it_works_with(
    world: World,
) -> None:
    world.memory.scratch = {Role.PREFIX: 10 * PAGE, Role.TRAINER: 20 * PAGE}
    first = world.memory.now(want(2))
    second = world.memory.now(want(3))
    world.memory.release(first)
    world.memory.release(second)
    world.memory.now(want(1))
    assert world.memory.leased().private == ((Role.PREFIX, 15 * PAGE),)
    world.memory.trimmed(Role.PREFIX)
    assert world.memory.leased().private == ((Role.PREFIX, PAGE),), "what is leased now, and no work since"
    world.memory.now(want(1))
    assert world.memory.leased().private == ((Role.PREFIX, 12 * PAGE),)


def test_what_an_owner_works_with_is_on_the_books_of_the_phases_in_which_it_has_leases(world: World) -> None:
    world.memory.scratch = {Role.PREFIX: 10 * PAGE, Role.TRAINER: 20 * PAGE}
    held, other = world.memory.now(want(2)), world.memory.now(want(1, owner=Role.TRAINER))
    world.memory.release(other)
    worked = ((Role.PREFIX, 12 * PAGE), (Role.TRAINER, 21 * PAGE))
    assert world.memory.leased().private == worked, "also between units"
    world.memory.enter(Phase.SCORE)
    assert world.memory.leased().private == ((Role.PREFIX, 12 * PAGE), (Role.TRAINER, PAGE))
    world.memory.release(held)
    world.memory.enter(Phase.TRAIN)
    assert world.memory.leased().private == ((Role.PREFIX, 2 * PAGE), (Role.TRAINER, PAGE)), "allocators keep it"
    world.memory.now(want(1, owner=Role.TRAINER))
    assert world.memory.leased().private == ((Role.PREFIX, 2 * PAGE), (Role.TRAINER, 21 * PAGE))


def test_an_observer_hears_of_each_phase_with_what_workers_held_at_most_in_the_one_that_ended(world: World) -> None:
    watched = Watched()
    world.memory.observers = Observers({DEVICE: watched})  # type: ignore[dict-item] # has what is used of it
    world.record.step = 3
    one, two = world.memory.now(want(2)), world.memory.now(want(3))
    world.memory.measured((Held(lease=one.lease, size_bytes=100),))
    world.memory.measured((Held(lease=two.lease, size_bytes=50),))
    world.memory.release(one)
    world.memory.measured((Held(lease=two.lease, size_bytes=60),))
    world.memory.enter(Phase.SCORE)
    world.memory.enter(Phase.TRAIN)
    assert watched.entered == [(Phase.SCORE, 3, {Role.PREFIX: 150}), (Phase.TRAIN, 3, {})]


# --- several devices ----------------------------------------------------------------------------------------------

OTHER = Device(index=1)
BOTH = (DEVICE, OTHER)
HOST = Device(index=HOST_INDEX)


class Pair(World):
    """Two devices of host memory, ten and six pages, and a place of one page for what is there once."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.ledger = Ledger({DEVICE: BUDGET, OTHER: 6 * PAGE, HOST: PAGE})
        self.memory = Memory(self.ledger, self.holder, self.record, DEVICE, HOST, kind=MemoryKind.HOST)
        self.memory.enter(Phase.ROLLOUT)

    def held_pages(self) -> list[int]:
        return [device.held_bytes // PAGE for device in self.memory.view().devices]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_processes_that_work_together_get_a_block_each_on_its_own_device(pair: Pair) -> None:
    blocks = pair.memory.now(want(2, segment=True), devices=BOTH)
    assert [block.device for block in blocks.blocks] == [DEVICE, OTHER]
    assert blocks.leader == blocks.on(0) != blocks.on(1)
    assert (blocks.ref, blocks.lease) == (blocks.on(0).ref, blocks.on(0).lease)
    assert pair.held_pages() == [2, 2, 0]
    assert [event.device for event in pair.events(LeaseGranted)] == [DEVICE, OTHER]
    pair.memory.release(blocks)
    assert pair.held_pages() == [0, 0, 0]
    assert pair.holder.measured() == {}


def test_what_is_there_once_a_node_lies_beside_the_devices_and_is_the_host_s(pair: Pair) -> None:
    block = pair.memory.now(want(1, segment=True, on_host=True))
    assert pair.held_pages() == [0, 0, 1]
    assert block.ref.memory is MemoryKind.HOST
    assert pair.memory.leased().segments_bytes == 0


def test_blocks_are_awaited_until_the_last_device_has_them_and_later_ones_do_not_pass(pair: Pair) -> None:
    order: list[str] = []
    first = pair.memory.now(want(4), devices=(OTHER,))
    kept: list[Blocks] = []

    def then(name: str) -> Callable[[tuple[Blocks, ...]], None]:
        def granted(blocks: tuple[Blocks, ...]) -> None:
            order.append(name)
            kept.extend(blocks)

        return granted

    pair.memory.when_free((want(3), want(1)), then("both"), devices=BOTH)
    pair.memory.when_free((want(1),), then("later"), devices=(OTHER,))
    assert order == []
    assert pair.held_pages() == [4, 4, 0], "what fits on one device is held there"
    assert [event.device for event in pair.events(LeaseWaiting)] == [OTHER] * 3
    pair.memory.release(first)
    assert order == ["both", "later"]
    assert [[block.device for block in blocks.blocks] for blocks in kept] == [[DEVICE, OTHER]] * 2 + [[OTHER]]
    assert pair.held_pages() == [4, 5, 0]


def test_a_reservation_of_one_name_can_be_made_on_each_device(pair: Pair) -> None:
    for device in BOTH:
        pair.ledger.reserve(
            Reservation(name="K/V", device=device, size_bytes=2 * PAGE, phases=frozenset({Phase.ROLLOUT}))
        )
    taken = pair.memory.now(want(2, last=Phase.ROLLOUT, reservation="K/V"), devices=BOTH)
    assert pair.held_pages() == [2, 2, 0]
    with pytest.raises(BudgetError, match="from K/V"):
        pair.memory.now(want(1, last=Phase.ROLLOUT, reservation="K/V"), devices=(OTHER,))
    pair.memory.release(taken)


def test_private_memory_is_counted_and_trimmed_on_the_device_where_it_is(pair: Pair) -> None:
    pair.memory.release(pair.memory.now(want(3, last=Phase.ROLLOUT), devices=BOTH))
    pair.memory.now(want(1, last=Phase.ROLLOUT), devices=(OTHER,))
    assert pair.memory.leased().private == ((Role.PREFIX, 3 * PAGE),), "of the first device"
    pair.memory.trimmed(Role.PREFIX, (OTHER,))
    assert pair.memory.leased().private == ((Role.PREFIX, 3 * PAGE),)
    pair.memory.trimmed(Role.PREFIX)
    assert dict(pair.memory.leased().private) == {}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    units=st.lists(
        st.tuples(st.sampled_from([(DEVICE,), (OTHER,), BOTH, (OTHER, DEVICE)]), st.integers(1, 6)), max_size=12
    ),
    seed=st.integers(0, 2**16),
)
def test_whoever_asks_gets_its_blocks_on_all_devices_if_those_who_have_theirs_give_them_back(
    tmp_path: Path, units: list[tuple[tuple[Device, ...], int]], seed: int
) -> None:
    made, rng = Pair(tmp_path), random.Random(seed)
    have: list[tuple[Blocks, ...]] = []
    left = list(units)
    done = 0
    try:
        while done < len(units):
            if left and (not have or rng.random() < 0.6):
                devices, pages = left.pop(0)
                made.memory.when_free((want(pages),), have.append, devices=devices)
            else:
                assert have, "somebody can always be worked on to its end"
                for blocks in have.pop(rng.randrange(len(have))):
                    made.memory.release(blocks)
                done += 1
            made.ledger.check_integrity()
        assert made.held_pages() == [0, 0, 0]
    finally:
        made.close()


def test_each_device_s_observer_hears_of_its_own_workers_and_reads_its_own_books(pair: Pair) -> None:
    first, second = Watched(), Watched()
    pair.memory.observers = Observers({DEVICE: first, OTHER: second})  # type: ignore[dict-item] # as above
    blocks = pair.memory.now(want(2), devices=BOTH)
    pair.memory.now(want(1, segment=True), devices=(OTHER,))
    pair.memory.measured((Held(lease=blocks.on(1).lease, size_bytes=100),))
    pair.memory.enter(Phase.SCORE)
    assert first.entered == [(Phase.SCORE, None, {})]
    assert second.entered == [(Phase.SCORE, None, {Role.PREFIX: 100})]
    assert [pair.memory.leased(device).segments_bytes for device in BOTH] == [0, PAGE]
    assert pair.memory.leased(Device(index=7)).total_bytes == 0, "it was asked for before anything is there"


def test_what_the_dead_held_and_asked_for_ends_but_what_stands_and_what_others_have(world: World) -> None:
    world.memory.enter(Phase.IDLE)
    world.memory.enter(Phase.LOAD)
    weights = world.memory.now(want(2, owner=Role.TRAINER, first=Phase.LOAD, last=Phase.DRAIN, segment=True))
    world.memory.enter(Phase.ROLLOUT)
    inputs = world.memory.now(want(1, owner=Role.INPUT, first=Phase.IDLE, last=Phase.DRAIN, segment=True))
    world.memory.now(want(3, owner=Role.PREFIX, segment=True))
    world.memory.now(want(2, owner=Role.ROLLOUT, last=Phase.ROLLOUT))
    granted: list[Any] = []
    world.memory.when_free((want(7, owner=Role.PREFIX),), lambda _: pytest.fail("for nobody"))
    world.memory.when_free((want(4, owner=Role.INPUT, first=Phase.IDLE, last=Phase.DRAIN),), granted.append)
    assert not granted
    world.memory.lose([Role.ROLLOUT, Role.PREFIX, Role.TRAINER])
    assert len(granted) == 1
    leases = {lease.id for device in world.memory.view().devices for lease in device.leases}
    assert leases == {weights.lease, inputs.lease, granted[0][0].lease}
    assert set(world.holder.measured()) == {weights.lease, inputs.lease}
    assert world.memory.leased().private == ((Role.INPUT, 4 * PAGE),)
    world.ledger.check_integrity()
    world.memory.enter(Phase.LOAD)
