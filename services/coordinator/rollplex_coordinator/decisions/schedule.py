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
Each engine, and each replica's prefix and trainer, runs one unit at a time. Within a replica suffix units are trained,
and prefix units run backward, in the order of their ids, because gradients are accumulated in that order; its prefix
units ask for memory in one fixed order (references, then actors), so that a unit that waits never waits for a later
one: the earliest reference needs only the rollout to be scored and freed, the earliest actor only its scores to be
trained and freed. Replicas lie on devices of their own, so none waits for another's memory. Phases are of the whole
step: SCORE begins when every engine is done, TRAIN when every replica has scored.

Knows nothing of sockets, clocks, bytes, tensors, devices or how much memory there is.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.errors import StateError
from rollplex.journal.phases import Phase
from rollplex.protocol.prefix import Which
from rollplex_coordinator.decisions.instructions import (
    Ask,
    Backward,
    Complete,
    Enter,
    Forward,
    Generate,
    Instruction,
    Mode,
    Release,
    Reward,
    Score,
    Train,
)
from rollplex_coordinator.decisions.lanes import EngineLane, ReplicaLane, engine_lanes, replica_lanes
from rollplex_coordinator.decisions.plan import StepPlan


class Schedule:
    """One step. Every method takes one event and returns what to do now, in order.

    Args:
        plan: the step's units.
        mode: serial, overlap or stream.
        reference: whether groups are scored under reference weights (beta above 0).
        batch_rewards: whether a suffix unit needs the rewards of the whole step (advantages scaled by the batch).
        after_prefill: whether prefix work beside the rollout waits until the prompts of the decode units are prefilled.

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
        self._engines = engine_lanes(plan)
        self._replicas = replica_lanes(plan, (Which.REFERENCE, Which.ACTOR) if reference else (Which.ACTOR,))
        self._ready: set[tuple[Which, int]] = set()
        self._started = False
        self._finished: set[int] = set()
        self._rewarded: set[int] = set()
        self._scored: set[int] = set()
        self._phase = Phase.IDLE
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
        return any(isinstance(lane.job, Forward) for lane in self._replicas) and not self._rollout_over

    # --- events ---------------------------------------------------------------------------------------------------

    def start(self) -> list[Instruction]:
        """The inputs are there."""
        self._expect(not self._started, "start", "a step that has not started")
        self._started = True
        self._phase = Phase.ROLLOUT
        return [Enter(phase=Phase.ROLLOUT), *self._next()]

    def granted(self, which: Which, unit: int) -> list[Instruction]:
        """The ledger gave the memory that an `Ask` asked for."""
        lane = self._replica(unit)
        asked = lane.order[: lane.asked]
        self._expect((which, unit) in asked, f"granted {which} {unit}", "a unit that was asked for")
        self._expect((which, unit) not in lane.granted, f"granted {which} {unit}", "one grant per unit")
        lane.granted.append((which, unit))
        return list(self._next())

    def prefilled(self, unit: int) -> list[Instruction]:
        """Every prompt of the decode unit has its first token."""
        lane = self._engine(unit)
        self._expect(unit == lane.running, f"decode unit {unit} prefilled", f"unit {lane.running}")
        self._expect(not lane.prefilled, f"decode unit {unit} prefilled", "each unit once")
        lane.prefilled = True
        return list(self._next())

    def group_finished(self, group: int) -> list[Instruction]:
        """The last sample of a group stopped."""
        units = (lane.running for lane in self._engines if lane.running is not None)
        running = tuple(member for unit in units for member in self._plan.decode[unit])
        self._expect(group in running, f"group {group} finished", f"one of the groups being sampled {running}")
        self._expect(group not in self._finished, f"group {group} finished", "each group once")
        self._finished.add(group)
        return [Reward(group=group), *self._next()]

    def generated(self, unit: int) -> list[Instruction]:
        """A decode unit is done and its K/V given back."""
        lane = self._engine(unit)
        self._expect(unit == lane.running, f"decode unit {unit} done", f"unit {lane.running}")
        missing = set(self._plan.decode[unit]) - self._finished
        self._expect(not missing, f"decode unit {unit} done", f"groups {sorted(missing)} announced before")
        lane.end()
        return list(self._next())

    def group_rewarded(self, group: int) -> list[Instruction]:
        """The group has rewards, or is skipped by policy."""
        self._expect(group in self._finished, f"group {group} rewarded", "a finished group")
        self._expect(group not in self._rewarded, f"group {group} rewarded", "each group once")
        self._rewarded.add(group)
        return list(self._next())

    def forward_done(self, which: Which, unit: int) -> list[Instruction]:
        """The prefix team has run a forward."""
        self._finish_prefix(unit, Forward(which=which, unit=unit))
        self._ready.add((which, unit))
        return list(self._next())

    def scored(self, unit: int) -> list[Instruction]:
        """The prefix team has scored a suffix unit."""
        prefix = self._plan.suffix[unit].prefix
        release = unit == self._plan.prefix[prefix].suffix[-1]
        self._finish_prefix(prefix, Score(unit=unit, release=release))
        self._scored.add(unit)
        done = [Release(which=Which.REFERENCE, unit=prefix)] if release else []
        return [*done, *self._next()]

    def trained(self, unit: int) -> list[Instruction]:
        """The trainer team has run forward and backward of a suffix unit."""
        known = unit < len(self._plan.suffix)
        lane = self._replica(self._plan.suffix[unit].prefix if known else 0)
        self._expect(unit == lane.training, f"suffix unit {unit} trained", f"unit {lane.training}")
        lane.training = None
        lane.trained += 1
        return list(self._next())

    def backward_done(self, unit: int) -> list[Instruction]:
        """The prefix team has run a backward."""
        self._finish_prefix(unit, Backward(unit=unit))
        self._replica(unit).backward += 1
        return [Release(which=Which.ACTOR, unit=unit), *self._next()]

    # --- what the schedules differ in -----------------------------------------------------------------------------

    def _prefix_may_run(self) -> bool:
        reading = self._after_prefill and any(not (lane.over or lane.prefilled) for lane in self._engines)
        if self._mode is Mode.SERIAL or reading:
            return self._rollout_over
        return True

    def _suffix_may_run(self) -> bool:
        return self._mode is Mode.STREAM or self._rollout_over

    # --- rules ----------------------------------------------------------------------------------------------------

    @property
    def _rollout_over(self) -> bool:
        return all(lane.over for lane in self._engines)

    def _engine(self, decode: int) -> EngineLane:
        return self._engines[self._plan.engine_of(decode)]

    def _replica(self, prefix: int) -> ReplicaLane:
        return self._replicas[self._plan.replica_of(prefix)]

    def _next(self) -> Iterator[Instruction]:
        yield from self._next_phase()
        for engine in self._engines:
            if engine.running is None and not engine.over:
                yield Generate(unit=engine.begin())
        for replica in self._replicas:
            yield from self._next_of(replica)
        all_done = self._rollout_over and all(lane.over for lane in self._replicas)
        if all_done and not self._complete:
            self._complete = True
            yield Complete()

    def _next_of(self, lane: ReplicaLane) -> Iterator[Instruction]:
        if lane.job is None and (job := self._next_prefix_job(lane)) is not None:
            lane.job = job
            yield job
        # One unit asks ahead: the next asks once this one runs, so that nothing is leased long before it is needed.
        if self._prefix_may_run() and lane.asked == lane.forwarded and lane.asked < len(lane.order):
            which, unit = lane.order[lane.asked]
            lane.asked += 1
            yield Ask(which=which, unit=unit)
        following = lane.next_suffix
        if lane.training is None and following is not None and self._may_train(following):
            lane.training = following
            members = self._plan.prefix[self._plan.suffix[following].prefix].suffix
            yield Train(unit=following, first=following == members[0], release=following == members[-1])

    def _next_phase(self) -> Iterator[Instruction]:
        if self._phase is Phase.ROLLOUT and self._rollout_over:
            self._phase = Phase.SCORE
            yield Enter(phase=Phase.SCORE)
        all_scored = not self._reference or len(self._scored) == len(self._plan.suffix)
        if self._phase is Phase.SCORE and all_scored:
            self._phase = Phase.TRAIN
            yield Enter(phase=Phase.TRAIN)

    def _next_prefix_job(self, lane: ReplicaLane) -> Forward | Score | Backward | None:
        """What frees memory goes first: backward, then scoring, then the next forward."""
        if not lane.over:
            unit = self._plan.prefix[lane.prefix[lane.backward]]
            if lane.trained_all_of(unit):
                return Backward(unit=unit.index)
        for index in lane.suffix if self._reference and self._suffix_may_run() else ():
            suffix = self._plan.suffix[index]
            ready = (Which.REFERENCE, suffix.prefix) in self._ready and self._finished.issuperset(suffix.groups)
            if index not in self._scored and ready and self._scored_before(index):
                return Score(unit=index, release=index == self._plan.prefix[suffix.prefix].suffix[-1])
        if self._prefix_may_run() and lane.forwarded < len(lane.granted):
            which, forward = lane.granted[lane.forwarded]
            lane.forwarded += 1
            return Forward(which=which, unit=forward)
        return None

    def _scored_before(self, suffix: int) -> bool:
        """Within a prefix unit, suffix units are scored in order: the last one releases the reference's K/V."""
        members = self._plan.prefix[self._plan.suffix[suffix].prefix].suffix
        return all(index in self._scored for index in members if index < suffix)

    def _may_train(self, index: int) -> bool:
        if not self._suffix_may_run():
            return False
        unit = self._plan.suffix[index]
        rewarded = self._rewarded.issuperset(range(self._plan.num_groups) if self._batch_rewards else unit.groups)
        scored = not self._reference or index in self._scored
        return (Which.ACTOR, unit.prefix) in self._ready and rewarded and scored

    def _finish_prefix(self, unit: int, job: Forward | Score | Backward) -> None:
        """unit: the prefix unit that the job is about."""
        lane = self._replica(unit)
        self._expect(job == lane.job, f"prefix service did {job}", f"{lane.job}")
        lane.job = None

    def _expect(self, allowed: bool, event: str, needed: str) -> None:
        if not allowed:
            generated = sum(lane.done for lane in self._engines)
            raise StateError(
                "the step's schedule does not allow this event",
                got=event,
                needed=needed,
                where=f"phase {self._phase.name}, {generated} of {len(self._plan.decode)} decode units done",
            )
