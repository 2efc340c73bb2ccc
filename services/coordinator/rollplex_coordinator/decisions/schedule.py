"""When the units of one training step are given out: a pure state machine, events in, instructions out.

    event            who saw it             what may follow
    ---------------  ---------------------  -----------------------------------------------------------
    start            shell                  Generate(0), Ask(first prefix unit)
    granted          ledger                 Forward, Ask(next prefix unit)
    prefilled        rollout                Ask, Forward, if prefix work waits for it
    group_finished   rollout                Reward; Score and Train under `stream`
    generated        rollout                Generate(next) or Enter(SCORE), then Forward under `serial`
    group_rewarded   reward child           Train
    forward_done     prefix                 Forward, Score, Train
    scored           prefix                 Enter(TRAIN), Train, Release(reference unit)
    trained          trainer                Train(next), Backward
    backward_done    prefix                 Release(actor unit), Complete

The three schedules share every rule; they differ in two questions only (`_prefix_may_run`, `_suffix_may_run`).
Rollout, prefix and trainer each run one unit at a time. Suffix units are trained, and prefix units run backward, in
the order of their ids, because gradients are accumulated in that order. Prefix units ask for memory in one fixed order
(references, then actors), so that a unit that waits never waits for a later one: the earliest reference needs only the
rollout to be scored and freed, the earliest actor only its scores to be trained and freed.

Knows nothing of sockets, clocks, bytes, tensors or how much memory there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from rollplex.errors import StateError
from rollplex.journal.phases import Phase
from rollplex.protocol.prefix import Which
from rollplex_coordinator.decisions.plan import StepPlan


class Mode(StrEnum):
    """The three schedules of design section 5."""

    SERIAL = "serial"
    OVERLAP = "overlap"
    STREAM = "stream"


class Generate(Struct, frozen=True, kw_only=True):
    """Rollout: sample decode unit `unit`."""

    unit: int


class Ask(Struct, frozen=True, kw_only=True):
    """Ledger: memory for a prefix unit; answer with `granted`, now or later."""

    which: Which
    unit: int


class Forward(Struct, frozen=True, kw_only=True):
    """Prefix: forward pass of a prefix unit whose memory is granted."""

    which: Which
    unit: int


class Reward(Struct, frozen=True, kw_only=True):
    """Reward child: score a finished group."""

    group: int


class Score(Struct, frozen=True, kw_only=True):
    """Prefix: reference log-probabilities of suffix unit `unit`; `release` after the last one of its prefix unit."""

    unit: int
    release: bool


class Train(Struct, frozen=True, kw_only=True):
    """Trainer: forward and backward of suffix unit `unit`."""

    unit: int
    first: bool
    release: bool


class Backward(Struct, frozen=True, kw_only=True):
    """Prefix: backward of prefix unit `unit`; all its suffix units are trained."""

    unit: int


class Release(Struct, frozen=True, kw_only=True):
    """Ledger: the memory of a prefix unit comes back."""

    which: Which
    unit: int


class Enter(Struct, frozen=True, kw_only=True):
    """The step enters a phase."""

    phase: Phase


class Complete(Struct, frozen=True, kw_only=True):
    """Every group is trained and every prefix backward done: over to the gate."""


Instruction: TypeAlias = Generate | Ask | Forward | Reward | Score | Train | Backward | Release | Enter | Complete


class Schedule:
    """One step. Every method takes one event and returns what to do now, in order.

    Args:
        plan: the step's units.
        mode: serial, overlap or stream.
        reference: whether groups are scored under reference weights (beta above 0).
        batch_rewards: whether a suffix unit needs the rewards of the whole step (advantages scaled by the batch).
        after_prefill: whether prefix work beside the rollout waits until the prompts of the decode unit are prefilled.

    Raises:
        StateError: from any method, for an event that cannot happen now; the state is then unchanged.
    """

    def __init__(
        self, plan: StepPlan, mode: Mode, *, reference: bool, batch_rewards: bool, after_prefill: bool = False
    ) -> None:
        self._plan = plan
        self._mode = mode
        self._reference = reference
        self._batch_rewards = batch_rewards
        self._after_prefill = after_prefill
        self._prefilled = False
        kinds = (Which.REFERENCE, Which.ACTOR) if reference else (Which.ACTOR,)
        self._order = [(which, unit.index) for which in kinds for unit in plan.prefix]
        self._asked = 0
        self._granted: list[tuple[Which, int]] = []
        self._forwarded = 0
        self._ready: set[tuple[Which, int]] = set()
        self._started = False
        self._generating: int | None = None
        self._generated = 0
        self._finished: set[int] = set()
        self._rewarded: set[int] = set()
        self._scored: set[int] = set()
        self._trained = 0
        self._backward_done = 0
        self._phase = Phase.IDLE
        self._prefix_job: Forward | Score | Backward | None = None
        self._training: int | None = None
        self._complete = False

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def beside(self) -> bool:
        """Whether a prefix forward, which can keep to its share of a device, runs beside a rollout that is going on."""
        return isinstance(self._prefix_job, Forward) and not self._rollout_over

    # --- events ---------------------------------------------------------------------------------------------------

    def start(self) -> list[Instruction]:
        """The inputs are there."""
        self._expect(not self._started, "start", "a step that has not started")
        self._started = True
        self._phase = Phase.ROLLOUT
        return [Enter(phase=Phase.ROLLOUT), *self._next()]

    def granted(self, which: Which, unit: int) -> list[Instruction]:
        """The ledger gave the memory that an `Ask` asked for."""
        asked = self._order[: self._asked]
        self._expect((which, unit) in asked, f"granted {which} {unit}", "a unit that was asked for")
        self._expect((which, unit) not in self._granted, f"granted {which} {unit}", "one grant per unit")
        self._granted.append((which, unit))
        return list(self._next())

    def prefilled(self, unit: int) -> list[Instruction]:
        """Every prompt of the decode unit has its first token."""
        self._expect(unit == self._generating, f"decode unit {unit} prefilled", f"unit {self._generating}")
        self._expect(not self._prefilled, f"decode unit {unit} prefilled", "each unit once")
        self._prefilled = True
        return list(self._next())

    def group_finished(self, group: int) -> list[Instruction]:
        """The last sample of a group stopped."""
        running = self._plan.decode[self._generating] if self._generating is not None else ()
        self._expect(group in running, f"group {group} finished", f"one of the groups being sampled {running}")
        self._expect(group not in self._finished, f"group {group} finished", "each group once")
        self._finished.add(group)
        return [Reward(group=group), *self._next()]

    def generated(self, unit: int) -> list[Instruction]:
        """A decode unit is done and its K/V given back."""
        self._expect(unit == self._generating, f"decode unit {unit} done", f"unit {self._generating}")
        missing = set(self._plan.decode[unit]) - self._finished
        self._expect(not missing, f"decode unit {unit} done", f"groups {sorted(missing)} announced before")
        self._generating = None
        self._generated += 1
        return list(self._next())

    def group_rewarded(self, group: int) -> list[Instruction]:
        """The group has rewards, or is skipped by policy."""
        self._expect(group in self._finished, f"group {group} rewarded", "a finished group")
        self._expect(group not in self._rewarded, f"group {group} rewarded", "each group once")
        self._rewarded.add(group)
        return list(self._next())

    def forward_done(self, which: Which, unit: int) -> list[Instruction]:
        """The prefix service has run a forward."""
        self._finish_prefix(Forward(which=which, unit=unit))
        self._ready.add((which, unit))
        return list(self._next())

    def scored(self, unit: int) -> list[Instruction]:
        """The prefix service has scored a suffix unit."""
        release = self._plan.suffix[unit].index == self._plan.prefix[self._plan.suffix[unit].prefix].suffix[-1]
        self._finish_prefix(Score(unit=unit, release=release))
        self._scored.add(unit)
        done = [Release(which=Which.REFERENCE, unit=self._plan.suffix[unit].prefix)] if release else []
        return [*done, *self._next()]

    def trained(self, unit: int) -> list[Instruction]:
        """The trainer has run forward and backward of a suffix unit."""
        self._expect(unit == self._training, f"suffix unit {unit} trained", f"unit {self._training}")
        self._training = None
        self._trained += 1
        return list(self._next())

    def backward_done(self, unit: int) -> list[Instruction]:
        """The prefix service has run a backward."""
        self._finish_prefix(Backward(unit=unit))
        self._backward_done += 1
        return [Release(which=Which.ACTOR, unit=unit), *self._next()]

    # --- what the schedules differ in -----------------------------------------------------------------------------

    def _prefix_may_run(self) -> bool:
        if self._mode is Mode.SERIAL or (self._after_prefill and not self._prefilled):
            return self._rollout_over
        return True

    def _suffix_may_run(self) -> bool:
        return self._mode is Mode.STREAM or self._rollout_over

    # --- rules ----------------------------------------------------------------------------------------------------

    @property
    def _rollout_over(self) -> bool:
        return self._generated == len(self._plan.decode)

    def _next(self) -> Iterator[Instruction]:
        yield from self._next_phase()
        if self._generating is None and not self._rollout_over:
            self._generating = self._generated
            self._prefilled = False
            yield Generate(unit=self._generated)
        # One unit asks ahead: the next asks once this one is granted.
        if self._prefix_may_run() and self._asked == len(self._granted) and self._asked < len(self._order):
            which, unit = self._order[self._asked]
            self._asked += 1
            yield Ask(which=which, unit=unit)
        if self._prefix_job is None and (job := self._next_prefix_job()) is not None:
            self._prefix_job = job
            yield job
        if self._training is None and self._may_train(self._trained):
            self._training = self._trained
            members = self._plan.prefix[self._plan.suffix[self._trained].prefix].suffix
            yield Train(unit=self._trained, first=self._trained == members[0], release=self._trained == members[-1])
        all_done = self._rollout_over and self._backward_done == len(self._plan.prefix)
        if all_done and not self._complete:
            self._complete = True
            yield Complete()

    def _next_phase(self) -> Iterator[Instruction]:
        if self._phase is Phase.ROLLOUT and self._rollout_over:
            self._phase = Phase.SCORE
            yield Enter(phase=Phase.SCORE)
        all_scored = not self._reference or len(self._scored) == len(self._plan.suffix)
        if self._phase is Phase.SCORE and all_scored:
            self._phase = Phase.TRAIN
            yield Enter(phase=Phase.TRAIN)

    def _next_prefix_job(self) -> Forward | Score | Backward | None:
        """What frees memory goes first: backward, then scoring, then the next forward."""
        if self._backward_done < len(self._plan.prefix):
            unit = self._plan.prefix[self._backward_done]
            if unit.suffix[-1] < self._trained:
                return Backward(unit=unit.index)
        for suffix in self._plan.suffix if self._reference and self._suffix_may_run() else ():
            ready = (Which.REFERENCE, suffix.prefix) in self._ready and self._finished.issuperset(suffix.groups)
            if suffix.index not in self._scored and ready and self._scored_before(suffix.index):
                last = suffix.index == self._plan.prefix[suffix.prefix].suffix[-1]
                return Score(unit=suffix.index, release=last)
        if self._prefix_may_run() and self._forwarded < len(self._granted):
            which, index = self._granted[self._forwarded]
            self._forwarded += 1
            return Forward(which=which, unit=index)
        return None

    def _scored_before(self, suffix: int) -> bool:
        """Within a prefix unit, suffix units are scored in order: the last one releases the reference's K/V."""
        members = self._plan.prefix[self._plan.suffix[suffix].prefix].suffix
        return all(index in self._scored for index in members if index < suffix)

    def _may_train(self, index: int) -> bool:
        if index == len(self._plan.suffix) or not self._suffix_may_run():
            return False
        unit = self._plan.suffix[index]
        rewarded = self._rewarded.issuperset(range(self._plan.num_groups) if self._batch_rewards else unit.groups)
        scored = not self._reference or index in self._scored
        return (Which.ACTOR, unit.prefix) in self._ready and rewarded and scored

    def _finish_prefix(self, job: Forward | Score | Backward) -> None:
        self._expect(job == self._prefix_job, f"prefix service did {job}", f"{self._prefix_job}")
        self._prefix_job = None

    def _expect(self, allowed: bool, event: str, needed: str) -> None:
        if not allowed:
            raise StateError(
                "the step's schedule does not allow this event",
                got=event,
                needed=needed,
                where=f"phase {self._phase.name}, {self._generated} of {len(self._plan.decode)} decode units done",
            )
