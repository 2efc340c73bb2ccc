"""The journal told as chapters: one iteration each, with its marks, samples and arrows.

Owns what each event becomes. Knows nothing of files. Holds one chapter at a time, so that a run of any length can be
told. What is still open where the telling ends (a killed run, a run that goes on, the end of a range) ends there and
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from rollplex.journal import events
from rollplex.journal.events import Event, Record, UnitKind
from rollplex.journal.phases import Phase
from rollplex.trace import marks
from rollplex.trace.arrows import Arrows
from rollplex.trace.leased import Leased
from rollplex.trace.marks import OPEN, Args, Chapter, Mark, Value, ns
from rollplex.trace.moments import moment
from rollplex.trace.saving import Saving
from rollplex.trace.steps import ranges
from rollplex.trace.updating import Updating

UNIT_NAMES = {
    UnitKind.GENERATE: "rollout",
    UnitKind.REFERENCE_PREFIX: "reference prefix",
    UnitKind.ACTOR_PREFIX: "actor prefix",
    UnitKind.SCORE: "score",
    UnitKind.SUFFIX: "suffix",
    UnitKind.PREFIX_BACKWARD: "prefix backward",
    UnitKind.VOTE: "sum and vote",
}
LEASES = frozenset({"LeaseGranted", "LeaseReleased", "LeaseWaiting"})
"""Types of events that only concern memory."""
BACKGROUND = frozenset({"PhaseEntered", "LeaseGranted", "LeaseReleased", "RunStarted"})
"""Types of events that matter also before the first iteration that is told."""
_SHOWN = ("reward", "loss", "kl", "completions/mean_length", "time/prefix_in_window")
_Tell: TypeAlias = Callable[[Any, int], None]
_Time: TypeAlias = int | tuple[int, int]
"""A moment, or a beginning and an end."""


class Narrator:
    """Takes the records of one journal in order and gives chapters."""

    def __init__(self) -> None:
        self._chapter = Chapter()
        self._arrows = Arrows()
        self._last_ns = 0
        self._phase: tuple[str, int] | None = None
        self._iteration: tuple[int, int, Args] | None = None
        self._leased = Leased()
        self._rollout, self._trainer = "rollout[0:0]", "trainer[0:0]"
        self._sampled: list[tuple[events.GroupFinished, int]] = []
        self._updating = Updating()
        self._saving = Saving()
        self._tells: dict[type[Event], _Tell] = {
            events.RunStarted: self._run_started,
            events.PhaseEntered: self._phase_entered,
            events.StageDone: self._stage,
            events.IterationStarted: self._iteration_started,
            events.IterationDone: self._iteration_done,
            events.UnitDone: self._unit,
            events.GroupFinished: self._group_finished,
            events.GroupRewarded: self._rewarded,
            events.GroupSkipped: self._group_skipped,
            events.LeaseGranted: self._lease,
            events.LeaseReleased: self._lease,
            events.LeaseWaiting: self._waiting,
            events.UpdateBegin: self._updating.begin,
            events.UpdateCommitted: self._updating.commit,
            events.UpdateSkipped: self._updating.skip,
            events.EvalStarted: self._saving.eval_started,
            events.EvalDone: self._saving.eval_done,
            events.CheckpointSaved: self._saving.saved,
        }

    # --- for the caller -------------------------------------------------------------------------------------------

    def skip(self, record: Record) -> None:
        """A record before the range that is told: only what lasts into it is remembered."""
        match record.event:
            case events.RunStarted():
                self._leased.drop(0)
            case events.PhaseEntered() as entered:
                self._phase = (entered.phase, ns(entered.start_s))
            case events.LeaseGranted() | events.LeaseReleased() as lease:
                self._leased.tell(lease, 0)
            case _:
                pass

    def begin(self, at_s: float) -> None:
        """The range that is told begins here."""
        self._last_ns = ns(at_s)
        if self._phase is not None:
            self._phase = (self._phase[0], self._last_ns)
        self._chapter.samples += self._leased.now(self._last_ns)

    def tell(self, record: Record) -> Iterator[Chapter]:
        """A record of the range; gives the chapter that it ends, if it ends one."""
        if isinstance(record.event, events.IterationStarted):
            yield from self._turn_page()
        at_ns = ns(record.monotonic_s)
        self._last_ns = max(self._last_ns, at_ns)
        tell = self._tells.get(type(record.event))
        if tell is not None:
            tell(record.event, at_ns)
        else:
            self._chapter.marks.append(moment(record.event, at_ns))

    def end(self, at_s: float | None = None) -> Iterator[Chapter]:
        """The range is told: what is open ends at `at_s`, or with the last record."""
        if at_s is not None:
            self._last_ns = max(self._last_ns, ns(at_s))
        self._cut()
        yield from self._turn_page()

    # --- chapters -------------------------------------------------------------------------------------------------

    def _turn_page(self) -> Iterator[Chapter]:
        for event, end_ns in self._sampled:  # of a decode unit that never ended
            self._place(event, end_ns)
        self._sampled.clear()
        if not self._chapter.marks:  # a range has just begun: what is held then belongs to what follows
            return
        self._chapter.arrows = self._arrows.chains()
        yield self._chapter
        self._chapter, self._arrows = Chapter(), Arrows()

    def _cut(self) -> None:
        if self._phase is not None:
            self._leave_phase(max(self._last_ns, self._phase[1]), (OPEN,))
        self._phase = None
        if self._iteration is not None:
            step, start_ns, args = self._iteration
            self._add(marks.ITERATIONS, f"iteration {step}", "iteration", (start_ns, self._last_ns), (*args, OPEN))
        self._iteration = None

    def _add(self, track: str, name: str, kind: str, time: _Time, args: Args = ()) -> Mark:
        start_ns, end_ns = time if isinstance(time, tuple) else (time, None)
        end_ns = None if end_ns is None else max(start_ns, end_ns)
        mark = Mark(track=track, name=name, kind=kind, start_ns=start_ns, end_ns=end_ns, args=args)
        self._chapter.marks.append(mark)
        self._last_ns = max(self._last_ns, start_ns if end_ns is None else end_ns)
        return mark

    # --- the run, its phases and iterations -----------------------------------------------------------------------

    def _run_started(self, event: events.RunStarted, at_ns: int) -> None:
        """Also a run that goes on in the same journal: what the former process held is gone."""
        self._cut()
        self._chapter.samples += self._leased.drop(at_ns)
        self._chapter.marks.append(moment(event, at_ns))

    def _stage(self, event: events.StageDone, _at_ns: int) -> None:
        self._add(marks.STARTUP, event.name, "stage", (ns(event.start_s), ns(event.end_s)))

    def _phase_entered(self, event: events.PhaseEntered, _at_ns: int) -> None:
        start_ns = ns(event.start_s)
        self._leave_phase(start_ns, ())
        self._phase = (event.phase, start_ns)

    def _leave_phase(self, end_ns: int, more: Args) -> None:
        if self._phase is None:
            return
        name, start_ns = self._phase
        self._add(marks.PHASES, name, "phase", (start_ns, end_ns), more)
        if name == Phase.UPDATE.name:
            self._chapter.marks += self._updating.marks(start_ns, end_ns, self._trainer, more, self._arrows)
        elif name in {Phase.EVAL.name, Phase.CHECKPOINT.name}:
            self._chapter.marks += self._saving.marks(name, start_ns, end_ns, more)

    def _iteration_started(self, event: events.IterationStarted, at_ns: int) -> None:
        self._chapter.step = event.step
        self._iteration = (event.step, at_ns, (("version", event.version), ("prompts", len(event.rows))))

    def _iteration_done(self, event: events.IterationDone, at_ns: int) -> None:
        self._chapter.done = True
        if self._iteration is not None:
            step, start_ns, args = self._iteration
            shown = tuple((name, value) for name in _SHOWN if (value := event.metrics.get(name)) is not None)
            self._add(marks.ITERATIONS, f"iteration {step}", "iteration", (start_ns, at_ns), (*args, *shown))
        self._iteration = None

    # --- work -----------------------------------------------------------------------------------------------------

    def _unit(self, event: events.UnitDone, _at_ns: int) -> None:
        args: list[tuple[str, Value]] = [("step", event.step), ("groups", ranges(event.groups))]
        if event.vision_prompts:
            args.append(("prompts through the vision tower", event.vision_prompts))
        start_ns, end_ns = ns(event.start_s), ns(event.end_s)
        name = f"{UNIT_NAMES[event.kind]} {event.unit}"
        mark = self._add(event.service, name, event.kind.value, (start_ns, end_ns), tuple(args))
        self._arrows.unit(event.kind, event.unit, event.groups, mark)
        if event.kind is UnitKind.SUFFIX:
            self._trainer = event.service
        if event.kind is UnitKind.GENERATE:
            self._generated(event, start_ns, end_ns)

    def _generated(self, event: events.UnitDone, start_ns: int, end_ns: int) -> None:
        self._rollout = event.service
        step: Args = (("step", event.step),)
        decode_ns = None if event.decode_start_s is None else ns(event.decode_start_s)
        if decode_ns is not None and start_ns <= decode_ns <= end_ns:
            self._add(event.service, "prefill", "prefill", (start_ns, decode_ns), step)
            self._add(event.service, "decode", "decode", (decode_ns, end_ns), step)
        of_unit = [item for item in self._sampled if item[0].group in event.groups]
        self._sampled = [item for item in self._sampled if item[0].group not in event.groups]
        for finished, at_ns in of_unit:
            self._place(finished, at_ns)

    def _group_finished(self, event: events.GroupFinished, _at_ns: int) -> None:
        """Kept until its decode unit tells which service sampled it."""
        self._sampled.append((event, ns(event.end_s)))

    def _place(self, event: events.GroupFinished, end_ns: int) -> None:
        args: Args = (("row", event.row), ("responses", len(event.lengths)), ("tokens", sum(event.lengths)))
        name = f"group {event.group} done"
        self._arrows.done[event.group] = self._add(self._rollout, name, "group_finished", end_ns, args)

    def _rewarded(self, event: events.GroupRewarded, _at_ns: int) -> None:
        given = (("mean", event.mean), ("standard deviation", event.std))
        args = (("row", event.row), *((name, value) for name, value in given if value is not None))
        self._arrows.rewarded[event.group] = self._add(
            marks.REWARDS, f"reward group {event.group}", "reward", (ns(event.start_s), ns(event.end_s)), args
        )

    def _group_skipped(self, event: events.GroupSkipped, at_ns: int) -> None:
        args = (("row", event.row), ("function", event.function), ("problem", event.problem), ("detail", event.detail))
        self._add(marks.REWARDS, f"group {event.group} left out", "group_skipped", at_ns, args)

    # --- memory ---------------------------------------------------------------------------------------------------

    def _lease(self, event: events.LeaseGranted | events.LeaseReleased, at_ns: int) -> None:
        self._chapter.samples.append(self._leased.tell(event, at_ns))

    def _waiting(self, event: events.LeaseWaiting, at_ns: int) -> None:
        args = (("owner", event.owner), ("bytes", event.size_bytes), ("free bytes", event.free_bytes))
        self._add(marks.WAITS, f"{event.kind.value} waits", "lease_waiting", at_ns, args)
