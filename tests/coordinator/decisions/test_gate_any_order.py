"""The gate's invariants under any order of events, legal or not, and at a crash after any of them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollplex.errors import StateError, UpdateError
from rollplex_coordinator.decisions.gate import Gate, State
from rollplex_coordinator.decisions.gate_steps import (
    Apply,
    DrainReader,
    GateStep,
    JournalBegin,
    JournalCommit,
    Opened,
    Prepare,
    Skip,
    TellReader,
)


class AnyOrder(RuleBasedStateMachine):
    """Throws events, legal and not, at a gate. Beside it: the weights as trainer, readers and disk see them. Whatever
    the gate instructs has been legal in that world; whatever it refuses has changed nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(max_failed_votes=4)
        self.reading: dict[str, bool] = {}
        self.disk: list[tuple[str, int]] = []
        self.versions = [0]
        self.writing = False
        self.due: list[GateStep] = []
        self.steps_done: list[tuple[int, bool]] = []
        self.sampled: dict[int, int] = {}
        self.trained: list[int] = []
        self.backward: list[int] = []
        self.groups = 0

    def _throw(self, act: Callable[[], tuple[GateStep, ...]], *, legal: bool) -> bool:
        before = (str(vars(self.gate)), str(vars(self.gate._tally)) if self.gate._tally else "")
        try:
            steps = act()
        except StateError:
            assert not legal, f"refused {self.gate.state}"
            assert before == (str(vars(self.gate)), str(vars(self.gate._tally)) if self.gate._tally else "")
            return False
        except UpdateError:
            assert self.gate.state is State.FAILED
            self.due.clear()
            return True
        assert legal, f"allowed in {self.gate.state}"
        for step in steps:
            self._see(step)
        return True

    def _see(self, step: GateStep) -> None:
        match step:
            case Prepare():
                assert sorted(self.trained) == list(range(self.groups)), "I7: each group exactly once"
                assert set(self.sampled.values()) == {self.versions[-1]}, "I1: all tokens from the step's version"
                assert step.version == self.versions[-1]
            case JournalBegin():
                assert not any(self.reading.values()), "I4: BEGIN while somebody reads"
            case Apply():
                assert self.disk[-1] == ("BEGIN", step.version), "BEGIN is on disk before the weights change"
                assert not any(self.reading.values())
                self.writing = True
            case TellReader():
                assert not self.writing, "I4: told between BEGIN and COMMIT"
                assert step.version == self.versions[-1]
                self.reading[step.reader] = True
            case Opened():
                assert step.version == self.versions[-1]
                assert all(self.reading.values())
                self.steps_done.append((step.step, step.updated))
            case _:
                pass
        if not isinstance(step, Opened):
            self.due.append(step)

    def _answer(self, kind: type[GateStep], reader: str = "") -> GateStep | None:
        for step in self.due:
            if isinstance(step, kind) and getattr(step, "reader", "") == reader:
                return step
        return None

    @rule(reader=st.sampled_from(("a", "b", "c")))
    def register(self, reader: str) -> None:
        legal = self.gate.state is State.OPEN and reader not in self.reading
        if self._throw(lambda: self.gate.register_reader(reader, on_policy=True), legal=legal):
            self.reading[reader] = True

    @rule(reader=st.sampled_from(("a", "b", "c")))
    def die(self, reader: str) -> None:
        known = reader in self.reading
        self.reading.pop(reader, None)
        self.due = [step for step in self.due if getattr(step, "reader", "") != reader]
        self._throw(lambda: self.gate.remove_reader(reader), legal=known)

    @rule(step=st.integers(0, 3), groups=st.integers(1, 2), data=st.data())
    def begin(self, step: int, groups: int, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from((self.gate.step, step)))
        legal = self.gate.state is State.OPEN and not self.gate.running and number == self.gate.step
        if self._throw(lambda: self.gate.begin_step(number, groups, [range(groups)]), legal=legal):
            self.groups, self.sampled, self.trained, self.backward = groups, {}, [], []

    @rule(group=st.integers(0, 2), start=st.sampled_from((0, 0, 1, -1)), end=st.sampled_from((0, 0, 1, -1)))
    def sample(self, group: int, start: int, end: int) -> None:
        self.sample_from(group, self.versions[-1] + start, self.versions[-1] + end)

    def sample_from(self, group: int, start: int, end: int) -> None:
        at_step = self.gate.state is State.OPEN and self.gate.running
        legal = at_step and group < self.groups and group not in self.sampled and start == end == self.versions[-1]
        if self._throw(lambda: self.gate.group_sampled(group, start, end), legal=legal):
            self.sampled[group] = start

    @rule(group=st.integers(0, 2))
    def train(self, group: int) -> None:
        at_step = self.gate.state is State.OPEN and self.gate.running
        legal = at_step and group in self.sampled and group not in self.trained
        if self._throw(lambda: self.gate.group_trained(group), legal=legal):
            self.trained.append(group)

    @rule(unit=st.integers(0, 1))
    def back(self, unit: int) -> None:
        at_step = self.gate.state is State.OPEN and self.gate.running
        legal = at_step and unit == 0 and not self.backward and len(self.trained) == self.groups
        if self._throw(lambda: self.gate.prefix_backward_done(unit), legal=legal):
            self.backward.append(unit)

    @rule()
    def close(self) -> None:
        legal = self.gate.state is State.OPEN and self.gate.running and self.backward == [0]
        self._throw(self.gate.close, legal=legal)

    @rule()
    def finish_the_step(self) -> None:
        """What is left of it, or of a new one; so that updates are reached often."""
        if self.gate.state is not State.OPEN:
            return
        if not self.gate.running:
            self.groups, self.sampled, self.trained, self.backward = 2, {}, [], []
            self._throw(lambda: self.gate.begin_step(self.gate.step, 2, [range(2)]), legal=True)
        for group in range(self.groups):
            self.sample_from(group, self.versions[-1], self.versions[-1] + 1)
            self.sample_from(group, self.versions[-1], self.versions[-1])
            self.train(group)
            self.train(group)
            self.close()
        self.back(0)
        self.close()

    @rule(often=st.integers(0, 5))
    def abandon(self, often: int) -> None:
        running = self.gate.state is State.OPEN and self.gate.running
        if often == 0 or not running:
            self._throw(self.gate.abandon, legal=running)

    @rule(finite=st.sampled_from((True, True, False)))
    def vote(self, finite: bool) -> None:
        due = self._answer(Prepare)
        legal = due is not None and self.gate.state is State.PREPARING
        if self._throw(lambda: self.gate.voted(finite=finite), legal=legal) and due in self.due:
            self.due.remove(due)

    @rule(reader=st.sampled_from(("a", "b", "c")), off=st.sampled_from((0, 0, 0, 1)))
    def drain(self, reader: str, off: int) -> None:
        due = self._answer(DrainReader, reader)
        if due is not None and off == 0:
            self.reading[reader] = False
            self.due.remove(due)
        version = self.versions[-1] + off
        self._throw(lambda: self.gate.reader_drained(reader, version), legal=due is not None and off == 0)

    @rule()
    def disk_begin(self) -> None:
        due = self._answer(JournalBegin)
        if isinstance(due, JournalBegin):
            self.disk.append(("BEGIN", due.version))
            self.due.remove(due)
        self._throw(self.gate.begun_durable, legal=due is not None)

    @rule(off=st.sampled_from((1, 1, 1, 0, 2)))
    def apply(self, off: int) -> None:
        due = self._answer(Apply)
        legal = due is not None and off == 1
        if legal and due is not None:
            self.due.remove(due)
            self.versions.append(self.versions[-1] + 1)
        version = self.versions[-1] + off - 1 if legal else self.versions[-1] + off
        self._throw(lambda: self.gate.applied(version, "d"), legal=legal)

    @rule()
    def disk_commit(self) -> None:
        due = self._answer(JournalCommit)
        if isinstance(due, JournalCommit):
            self.disk.append(("COMMIT", due.version))
            self.due.remove(due)
            self.writing = False
        self._throw(self.gate.committed_durable, legal=due is not None)

    @rule()
    def skip(self) -> None:
        due = self._answer(Skip)
        if due is not None:
            self.due.remove(due)
        self._throw(self.gate.skipped, legal=due is not None)

    @rule(reader=st.sampled_from(("a", "b", "c")), off=st.sampled_from((0, 0, 0, -1, 1)))
    def drop(self, reader: str, off: int) -> None:
        due = self._answer(TellReader, reader)
        legal = due is not None and off == 0
        if legal and due is not None:
            self.due.remove(due)
        self._throw(lambda: self.gate.caches_dropped(reader, self.versions[-1] + off), legal=legal)

    @rule(
        choices=st.lists(st.integers(0, 7), min_size=4, max_size=20), finite=st.sampled_from((True, True, True, False))
    )
    def answer_what_is_due(self, choices: list[int], finite: bool) -> None:
        """Some of the answers that a healthy node would give, in any order; so that updates are reached often."""
        for choice in choices:
            if not self.due:
                return
            match self.due[choice % len(self.due)]:
                case Prepare():
                    self.vote(finite)
                case DrainReader(reader=reader):
                    self.drain(reader, 0)
                    self.drain(reader, 0)
                case JournalBegin():
                    self.disk_begin()
                case Apply():
                    self.apply(1)
                case JournalCommit():
                    self.disk_commit()
                case Skip():
                    self.skip()
                case TellReader(reader=reader):
                    self.drop(reader, 0)
                    self.drop(reader, 0)
                case Opened():
                    raise AssertionError("nobody answers Opened")
            self.no_version_is_skipped_or_used_twice()
            self.nobody_reads_between_begin_and_commit()

    @invariant()
    def no_version_is_skipped_or_used_twice(self) -> None:
        """I2, on the trainer's side and on the disk; and a step is done once."""
        assert self.gate.version == self.versions[-1]
        assert self.versions == list(range(len(self.versions)))
        commits = [version for kind, version in self.disk if kind == "COMMIT"]
        assert commits == list(range(1, len(commits) + 1))
        begins = [version for kind, version in self.disk if kind == "BEGIN"]
        assert begins == list(range(len(begins)))
        updated = [step for step, moved in self.steps_done if moved]
        assert updated == sorted(set(updated))

    @invariant()
    def nobody_reads_between_begin_and_commit(self) -> None:
        """I4."""
        if self.writing or self.gate.state in {State.BEGINNING, State.APPLYING, State.COMMITTING}:
            assert not any(self.reading.values())
            assert not self.gate.may_read

    @invariant()
    def weights_that_are_written_have_a_begin_on_disk_without_its_commit(self) -> None:
        if self.writing:
            assert self.disk
            assert self.disk[-1][0] == "BEGIN"

    @invariant()
    def what_is_awaited_is_what_is_due(self) -> None:
        assert len(self.gate.awaited) == len(self.due)


AnyOrder.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
test_the_invariants_hold_under_any_order_of_events = AnyOrder.TestCase
