"""The ledger: lifetimes, reservations, the queue, and that no order of events breaks the books."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollplex.errors import BudgetError, StateError
from rollplex.journal.phases import WORKING_PHASES, Phase
from rollplex.protocol.common import Device, Kind
from rollplex_coordinator.decisions.ledger import Granted, Lease, LeaseRequest, Ledger, Reservation, Waiting

DEVICE = Device()
OTHER = Device(index=1)
ALWAYS = frozenset(WORKING_PHASES)


def block(size_bytes: int, **changes: Any) -> LeaseRequest:
    """A prefix unit's block, from ROLLOUT to TRAIN, unless told otherwise."""
    fields: dict[str, Any] = {
        "device": DEVICE,
        "kind": Kind.ACTOR_PREFIX_KV,
        "size_bytes": size_bytes,
        "producer": "prefix",
        "last_consumer": "trainer",
        "first": Phase.ROLLOUT,
        "last": Phase.TRAIN,
        "purpose": "a prefix unit",
    }
    return LeaseRequest(**(fields | changes))


def permanent(size_bytes: int, **changes: Any) -> LeaseRequest:
    return block(size_bytes, first=Phase.IDLE, last=Phase.DRAIN, purpose="weights", **changes)


def reservation(name: str, size_bytes: int, *phases: Phase) -> Reservation:
    return Reservation(name=name, device=DEVICE, size_bytes=size_bytes, phases=frozenset(phases))


def in_rollout(budget: int, *reservations: Reservation) -> Ledger:
    ledger = Ledger({DEVICE: budget})
    for item in reservations:
        ledger.reserve(item)
    ledger.enter(Phase.ROLLOUT)
    return ledger


def refused(kind: type[Exception], ledger: Ledger, act: Any) -> str:
    """The text of the refusal; the ledger is as it was."""
    before = ledger.snapshot()
    with pytest.raises(kind) as caught:
        act()
    assert ledger.snapshot() == before
    ledger.check_integrity()
    return str(caught.value)


def lease_of(answer: object) -> Lease:
    assert isinstance(answer, Granted)
    return answer.leases[0]


def test_a_request_that_fits_is_granted_and_its_release_gives_the_bytes_back() -> None:
    ledger = in_rollout(100)
    lease = lease_of(ledger.request(block(60)))
    assert (lease.size_bytes, lease.producer, lease.first, lease.last) == (60, "prefix", Phase.ROLLOUT, Phase.TRAIN)
    assert ledger.free_bytes(DEVICE) == 40
    assert ledger.release(lease.id, "trainer") == ()
    assert ledger.free_bytes(DEVICE) == 100


def test_two_leases_that_fit_alone_but_not_together_are_granted_in_turn() -> None:
    ledger = in_rollout(100)
    first = lease_of(ledger.request(block(60)))
    answer = ledger.request(block(50))
    assert answer == Waiting(request=2, ahead=0, missing_bytes=10)
    (granted,) = ledger.release(first.id, "prefix")
    assert granted.request == 2
    assert [lease.size_bytes for lease in granted.leases] == [50]


def test_a_small_request_does_not_pass_a_large_one_that_came_before() -> None:
    ledger = in_rollout(100)
    first = lease_of(ledger.request(block(60)))
    assert isinstance(ledger.request(block(50)), Waiting)
    assert ledger.request(block(1)) == Waiting(request=3, ahead=1, missing_bytes=0)
    assert [granted.request for granted in ledger.release(first.id, "prefix")] == [2, 3]


def test_blocks_of_one_request_are_granted_together_or_not_at_all() -> None:
    ledger = in_rollout(100)
    first = lease_of(ledger.request(block(60)))
    assert isinstance(ledger.request(block(30), block(30)), Waiting)
    assert ledger.free_bytes(DEVICE) == 40
    (granted,) = ledger.release(first.id, "prefix")
    assert [lease.size_bytes for lease in granted.leases] == [30, 30]
    assert len({lease.id for lease in granted.leases}) == 2


def test_what_never_lives_at_the_same_time_is_counted_in_turn_not_in_sum() -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT), reservation("workspace", 70, Phase.TRAIN))
    assert isinstance(ledger.request(block(30)), Granted)
    kv = lease_of(ledger.request(block(60, producer="rollout", last=Phase.ROLLOUT, reservation="kv")))
    ledger.release(kv.id, "rollout")
    ledger.enter(Phase.SCORE)
    ledger.enter(Phase.TRAIN)
    assert isinstance(ledger.request(block(70, producer="trainer", reservation="workspace")), Granted)
    assert ledger.snapshot().devices[0].peak_bytes == {"ROLLOUT": 90, "SCORE": 30, "TRAIN": 100}


def test_a_later_phase_that_would_not_have_room_makes_a_request_wait_now() -> None:
    ledger = in_rollout(100, reservation("workspace", 80, Phase.TRAIN))
    assert isinstance(ledger.request(block(15)), Granted)
    assert ledger.request(block(10)) == Waiting(request=2, ahead=0, missing_bytes=5)


def test_a_request_that_ends_before_the_later_phase_does_not_wait_for_it() -> None:
    ledger = in_rollout(100, reservation("workspace", 80, Phase.TRAIN))
    assert isinstance(ledger.request(block(90, last=Phase.SCORE)), Granted)


def test_leases_drawn_for_one_phase_leave_the_reservation_whole_in_another() -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT, Phase.EVAL))
    kv = lease_of(ledger.request(block(60, producer="rollout", last=Phase.ROLLOUT, reservation="kv")))
    assert isinstance(ledger.request(permanent(40)), Granted)
    refused(BudgetError, ledger, lambda: ledger.request(permanent(1)))
    ledger.release(kv.id, "rollout")
    ledger.enter(Phase.EVAL)
    evaluation = block(60, producer="rollout", first=Phase.EVAL, last=Phase.EVAL, reservation="kv")
    assert isinstance(ledger.request(evaluation), Granted)


def test_a_reservation_is_granted_at_once_although_others_wait() -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT))
    ledger.request(block(40))
    assert isinstance(ledger.request(block(10)), Waiting)
    assert isinstance(ledger.request(block(60, last=Phase.ROLLOUT, reservation="kv")), Granted)


def test_entering_a_phase_gives_out_what_was_kept_for_the_one_before() -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT))
    ledger.request(block(40))
    assert isinstance(ledger.request(block(30)), Waiting)
    assert [granted.request for granted in ledger.enter(Phase.SCORE)] == [2]


def test_what_can_never_fit_is_refused_with_the_table_of_who_holds_what() -> None:
    ledger = Ledger({DEVICE: 1_000})
    ledger.reserve(reservation("rollout K/V", 300, Phase.ROLLOUT))
    ledger.request(permanent(500, producer="trainer", kind=Kind.ACTOR_WEIGHTS))
    ledger.enter(Phase.ROLLOUT)
    text = refused(BudgetError, ledger, lambda: ledger.request(block(201)))
    assert "201 bytes asked for, 1 too many" in text
    for part in ("actor_weights", "trainer", "500", "rollout K/V", "300", "budget 1,000"):
        assert part in text
    assert isinstance(ledger.request(block(200)), Granted)


def test_a_request_that_could_not_fit_behind_a_permanent_one_in_the_queue_is_refused() -> None:
    ledger = in_rollout(100)
    ledger.request(block(80))
    assert isinstance(ledger.request(permanent(50)), Waiting)
    refused(BudgetError, ledger, lambda: ledger.request(block(51)))


def test_a_reservation_that_would_strand_a_request_in_the_queue_is_refused() -> None:
    ledger = in_rollout(100)
    first = lease_of(ledger.request(block(50, last=Phase.ROLLOUT)))
    assert isinstance(ledger.request(block(60)), Waiting)
    refused(BudgetError, ledger, lambda: ledger.reserve(reservation("late", 45, Phase.TRAIN)))
    ledger.reserve(reservation("late", 40, Phase.TRAIN))
    assert [granted.request for granted in ledger.release(first.id, "prefix")] == [2]


def test_a_reservation_for_fewer_phases_gives_out_what_the_others_kept() -> None:
    ledger = in_rollout(100, reservation("work", 60, Phase.ROLLOUT, Phase.TRAIN), reservation("kv", 10, Phase.ROLLOUT))
    ledger.request(block(30, last=Phase.ROLLOUT))
    assert isinstance(ledger.request(block(20, last=Phase.ROLLOUT)), Waiting)
    assert [granted.request for granted in ledger.cover({"work": frozenset({Phase.TRAIN})})] == [2]
    ledger.check_integrity()


def test_a_reservation_takes_other_phases_only_where_there_is_room_and_all_of_them_or_none() -> None:
    work, more = reservation("work", 60, Phase.TRAIN), reservation("more", 20, Phase.TRAIN)
    ledger = in_rollout(100, work, more)
    held = lease_of(ledger.request(block(30, last=Phase.ROLLOUT)))
    longer = frozenset({Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN})
    both = {"more": longer, "work": longer}
    refused(BudgetError, ledger, lambda: ledger.cover(both))
    ledger.release(held.id, "prefix")
    assert ledger.cover(both) == ()
    refused(BudgetError, ledger, lambda: ledger.request(block(30)))
    assert isinstance(ledger.request(block(60, reservation="work")), Granted)
    assert isinstance(ledger.request(block(20)), Granted)


def test_a_reservation_that_is_used_or_unknown_takes_no_other_phases() -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT))
    lease = lease_of(ledger.request(block(1, last=Phase.ROLLOUT, reservation="kv")))
    later = frozenset({Phase.TRAIN})
    assert "nothing drawn" in refused(StateError, ledger, lambda: ledger.cover({"kv": later}))
    assert "name of a reservation" in refused(StateError, ledger, lambda: ledger.cover({"vk": later}))
    ledger.release(lease.id, "prefix")
    refused(StateError, ledger, lambda: ledger.cover({"kv": frozenset()}))
    ledger.cover({"kv": later})
    ledger.enter(Phase.TRAIN)
    assert isinstance(ledger.request(block(60, first=Phase.TRAIN, reservation="kv")), Granted)


@pytest.mark.parametrize("size", [-1, 2**53 + 1, 10**30, math.nan, math.inf, 1.0, True, "1", None])
def test_a_size_that_is_no_number_of_bytes_is_refused(size: Any) -> None:
    ledger = in_rollout(100)
    refused(BudgetError, ledger, lambda: ledger.request(block(size)))
    refused(BudgetError, ledger, lambda: ledger.request(block(1), block(size)))
    refused(BudgetError, ledger, lambda: ledger.reserve(reservation("x", size, Phase.TRAIN)))
    with pytest.raises(BudgetError):
        Ledger({DEVICE: size})


def test_only_producer_and_last_consumer_release_and_only_once() -> None:
    ledger = in_rollout(100)
    lease = lease_of(ledger.request(block(60)))
    assert "prefix or trainer" in refused(StateError, ledger, lambda: ledger.release(lease.id, "rollout"))
    assert "a lease" in refused(StateError, ledger, lambda: ledger.release(99, "prefix"))
    ledger.release(lease.id, "prefix")
    assert "released before" in refused(StateError, ledger, lambda: ledger.release(lease.id, "prefix"))


def test_a_lease_may_not_outlive_its_phase_and_the_round_ends_only_without_it() -> None:
    ledger = in_rollout(100)
    lease = lease_of(ledger.request(block(60)))
    ledger.enter(Phase.TRAIN)
    text = refused(StateError, ledger, lambda: ledger.enter(Phase.UPDATE))
    assert "lease 1 of prefix (a prefix unit, to TRAIN)" in text
    refused(StateError, ledger, lambda: ledger.enter(Phase.ROLLOUT))
    ledger.release(lease.id, "trainer")
    ledger.enter(Phase.UPDATE)


def test_a_request_that_waits_may_not_outlive_its_phase_either() -> None:
    ledger = in_rollout(100)
    ledger.request(block(60))
    ledger.request(block(60, last=Phase.SCORE))
    assert "request 2" in refused(StateError, ledger, lambda: ledger.enter(Phase.TRAIN))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"device": OTHER}, "device with a budget"),
        ({"first": Phase.SCORE}, "lifetime with ROLLOUT in it"),
        ({"first": Phase.IDLE, "last": Phase.IDLE}, "lifetime with ROLLOUT in it"),
        ({"reservation": "nobody's"}, "one of ['kv']"),
        ({"reservation": "kv"}, "covers SCORE, TRAIN"),
    ],
)
def test_a_request_that_makes_no_sense_here_is_refused(changes: dict[str, Any], needed: str) -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT))
    assert needed in refused(StateError, ledger, lambda: ledger.request(block(10, **changes)))


def test_more_than_the_reservation_has_left_is_refused() -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT))
    ledger.request(block(40, last=Phase.ROLLOUT, reservation="kv"))
    refused(BudgetError, ledger, lambda: ledger.request(block(21, last=Phase.ROLLOUT, reservation="kv")))


def test_blocks_of_one_request_share_owner_device_and_reservation() -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT))
    refused(StateError, ledger, lambda: ledger.request(block(1), block(1, producer="rollout")))
    refused(StateError, ledger, lambda: ledger.request(block(1), block(1, last=Phase.ROLLOUT, reservation="kv")))
    refused(StateError, ledger, ledger.request)


def test_the_death_of_an_owner_ends_its_requests_and_serves_the_next() -> None:
    ledger = in_rollout(100)
    held = lease_of(ledger.request(block(60)))
    ledger.request(block(60))
    ledger.request(block(40, producer="input"))
    ledger.request(block(60, producer="input"))
    dropped = ledger.withdraw("prefix")
    assert [pending.request for pending in dropped.requests] == [2]
    assert [granted.request for granted in dropped.granted] == [3]
    assert [granted.request for granted in ledger.release(held.id, "prefix")] == [4]
    assert ledger.withdraw("prefix").requests == ()


def test_when_the_run_ends_nothing_new_starts_and_leases_still_come_back() -> None:
    ledger = in_rollout(100)
    lease = lease_of(ledger.request(block(60)))
    ledger.request(block(60))
    ledger.enter(Phase.DRAIN)
    assert ledger.snapshot().devices[0].waiting == ()
    refused(StateError, ledger, lambda: ledger.request(block(1)))
    refused(StateError, ledger, lambda: ledger.enter(Phase.IDLE))
    assert ledger.release(lease.id, "trainer") == ()
    assert ledger.free_bytes(DEVICE) == 100


def test_devices_have_budgets_and_queues_of_their_own() -> None:
    ledger = Ledger({DEVICE: 100, OTHER: 100})
    ledger.enter(Phase.ROLLOUT)
    ledger.request(block(60))
    assert isinstance(ledger.request(block(60)), Waiting)
    assert isinstance(ledger.request(block(60, device=OTHER)), Granted)
    assert ledger.free_bytes(OTHER) == 40


def test_a_reservation_needs_a_free_name_and_working_phases() -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT))
    refused(StateError, ledger, lambda: ledger.reserve(reservation("kv", 1, Phase.TRAIN)))
    refused(StateError, ledger, lambda: ledger.reserve(reservation("x", 1)))
    refused(StateError, ledger, lambda: ledger.reserve(reservation("x", 1, Phase.TRAIN, Phase.DRAIN)))
    refused(BudgetError, ledger, lambda: ledger.reserve(reservation("x", 41, Phase.ROLLOUT)))


def test_check_integrity_names_every_number_that_disagrees() -> None:
    ledger = in_rollout(100, reservation("kv", 60, Phase.ROLLOUT))
    ledger.request(block(60, last=Phase.ROLLOUT, reservation="kv"))
    account = ledger._accounts[DEVICE]
    account.held_bytes = 61
    account.drawn["kv"] = 7
    account.budget_bytes = 50
    with pytest.raises(StateError) as caught:
        ledger.check_integrity()
    for part in (
        "come to 60 bytes, the running sum is 61",
        "kv: leases draw 60 bytes, the running sum is 7",
        "budget is 50",
    ):
        assert part in str(caught.value)


# --- any order of events ------------------------------------------------------------------------------------------

BUDGET = 100
OWNERS = ("prefix", "trainer", "rollout", "input")
NEXT = {
    Phase.IDLE: (Phase.ROLLOUT, Phase.EVAL),
    Phase.ROLLOUT: (Phase.SCORE,),
    Phase.SCORE: (Phase.TRAIN,),
    Phase.TRAIN: (Phase.UPDATE,),
    Phase.UPDATE: (Phase.ROLLOUT, Phase.IDLE, Phase.CHECKPOINT),
    Phase.CHECKPOINT: (Phase.IDLE, Phase.ROLLOUT),
    Phase.EVAL: (Phase.IDLE,),
}


class Books(RuleBasedStateMachine):
    """Random requests, releases, deaths and phases, legal and not; beside the ledger a list of what it said."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger({DEVICE: BUDGET})
        self.held: dict[int, Lease] = {}
        self.queue: list[int] = []
        self.wanted: dict[int, tuple[LeaseRequest, ...]] = {}
        self.over: set[int] = set()
        self.reservations: list[Reservation] = []

    @initialize(
        kv=st.integers(0, 40),
        workspace=st.integers(0, 60),
        weights=st.integers(0, 30),
        phases=st.sets(st.sampled_from(WORKING_PHASES), min_size=1),
    )
    def load(self, kv: int, workspace: int, weights: int, phases: set[Phase]) -> None:
        self.reservations = [
            reservation("kv", kv, Phase.ROLLOUT, Phase.EVAL),
            reservation("workspace", workspace, Phase.SCORE, Phase.TRAIN),
            reservation("any", 10, *phases),
        ]
        for item in self.reservations:
            self.ledger.reserve(item)
        self._grant(self.ledger.request(permanent(weights)), (permanent(weights),))

    def _grant(self, answer: Granted | Waiting, blocks: tuple[LeaseRequest, ...]) -> None:
        self.wanted[answer.request] = blocks
        if isinstance(answer, Waiting):
            self.queue.append(answer.request)
            return
        assert [lease.size_bytes for lease in answer.leases] == [wanted.size_bytes for wanted in blocks]
        self.held |= {lease.id: lease for lease in answer.leases}

    def _serve(self, granted: tuple[Granted, ...]) -> None:
        """Grants come from the head of the queue, in its order."""
        for answer in granted:
            assert self.queue.pop(0) == answer.request
            self._grant(answer, self.wanted[answer.request])

    def _try(self, act: Any) -> Any:
        before = self.ledger.snapshot()
        try:
            return act()
        except (BudgetError, StateError):
            assert self.ledger.snapshot() == before
            return None

    @rule(
        sizes=st.lists(st.integers(0, 70), min_size=1, max_size=2),
        owner=st.sampled_from(OWNERS),
        first=st.sampled_from(WORKING_PHASES),
        last=st.sampled_from(Phase),
        name=st.sampled_from((None, None, None, "kv", "workspace", "any")),
    )
    def ask(self, sizes: list[int], owner: str, first: Phase, last: Phase, name: str | None) -> None:
        blocks = tuple(block(n, producer=owner, first=first, last=last, reservation=name) for n in sizes)
        answer = self._try(lambda: self.ledger.request(*blocks))
        if answer is None:
            return
        at_once = name is not None or (not self.queue and self._fits(blocks))
        assert isinstance(answer, Granted) == at_once
        self._grant(answer, blocks)

    def _fits(self, blocks: tuple[LeaseRequest, ...]) -> bool:
        """The rule, written once more: enough in every phase in which the blocks may live."""
        now = self.ledger.phase
        for phase in WORKING_PHASES:
            lives = [b for b in blocks if b.last is Phase.DRAIN or now <= phase <= b.last]
            others = [x for x in self.held.values() if x.last is Phase.DRAIN or now <= phase <= x.last]
            free = sum(x.size_bytes for x in others if x.reservation is None)
            kept = sum(r.size_bytes for r in self.reservations if phase in r.phases)
            if lives and free + kept + sum(b.size_bytes for b in lives) > BUDGET:
                return False
        return True

    @rule(data=st.data(), by=st.sampled_from(OWNERS))
    def give_back(self, data: st.DataObject, by: str) -> None:
        lease_id = data.draw(st.sampled_from([*self.held, 0, 10_000, *self.over]))
        lease = self.held.get(lease_id)
        allowed = lease is not None and by in {lease.producer, lease.last_consumer}
        granted = self._try(lambda: self.ledger.release(lease_id, by))
        assert (granted is not None) == allowed
        if allowed:
            del self.held[lease_id]
            self.over.add(lease_id)
            self._serve(granted)

    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner: str) -> None:
        dropped = self.ledger.withdraw(owner)
        ended = {request for request in self.queue if self.wanted[request][0].producer == owner}
        assert {pending.request for pending in dropped.requests} == ended
        self.queue = [request for request in self.queue if request not in ended]
        self._serve(dropped.granted)
        for lease in [lease for lease in self.held.values() if lease.producer == owner]:
            del self.held[lease.id]
            self.over.add(lease.id)
            self._serve(self.ledger.release(lease.id, owner))
        for device in self.ledger.snapshot().devices:
            assert all(lease.producer != owner for lease in device.leases)

    @rule(
        name=st.sampled_from(("kv", "workspace", "any", "none")),
        phases=st.sets(st.sampled_from(WORKING_PHASES)),
    )
    def cover(self, name: str, phases: set[Phase]) -> None:
        granted = self._try(lambda: self.ledger.cover({name: frozenset(phases)}))
        if granted is None:
            return
        assert phases
        self.reservations = [
            reservation(name, item.size_bytes, *phases) if item.name == name else item for item in self.reservations
        ]
        self._serve(granted)

    @rule(data=st.data())
    def move_on(self, data: st.DataObject) -> None:
        phase = data.draw(st.sampled_from(NEXT[self.ledger.phase]))
        granted = self._try(lambda: self.ledger.enter(phase))
        if granted is not None:
            self._serve(granted)

    @rule(size=st.integers(0, 30), phases=st.sets(st.sampled_from(WORKING_PHASES), min_size=1), number=st.integers())
    def reserve_more(self, size: int, phases: set[Phase], number: int) -> None:
        more = reservation(f"more {number}", size, *phases)

        def act() -> bool:
            self.ledger.reserve(more)
            return True

        if self._try(act):
            self.reservations.append(more)

    @precondition(lambda self: self.queue)
    @rule()
    def finish_the_work(self) -> None:
        """Whoever holds something for this round gives it back, as a worker that is not stuck does: then the queue
        empties, whatever was in it."""
        for _ in range(len(self.queue) + 1):
            for lease in [lease for lease in self.held.values() if not lease.permanent]:
                del self.held[lease.id]
                self.over.add(lease.id)
                self._serve(self.ledger.release(lease.id, lease.producer))
        assert self.queue == []

    @invariant()
    def the_books_agree_and_the_budget_holds(self) -> None:
        self.ledger.check_integrity()
        (device,) = self.ledger.snapshot().devices
        assert {lease.id: lease for lease in device.leases} == self.held
        assert sum(lease.size_bytes for lease in self.held.values()) == device.held_bytes <= BUDGET
        assert [pending.request for pending in device.waiting] == self.queue
        assert max(device.peak_bytes.values(), default=0) <= BUDGET
        assert device.free_bytes >= 0


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_leases_never_exceed_the_budget_whatever_happens = Books.TestCase


def test_requests_of_a_dead_owner_are_withdrawn_and_its_leases_stay() -> None:
    ledger = in_rollout(100)
    lease = lease_of(ledger.request(block(60)))
    ledger.request(block(60))
    ledger.request(block(30, producer="input"))
    dropped = ledger.withdraw("prefix")
    assert [pending.request for pending in dropped.requests] == [2]
    assert [granted.request for granted in dropped.granted] == [3]
    assert [each.id for each in ledger.snapshot().devices[0].leases] == [lease.id, dropped.granted[0].lease]
    ledger.check_integrity()
