"""Where the time before the first iteration goes. Pure functions over records; `startup_table` opens a journal.

The coordinator journals stages with their times. In a journal without them (an older one) the events that end them
give a coarser picture: the first lease is granted once the data is checked and the memory planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from rollplex.journal import events
from rollplex.journal.events import Record
from rollplex.journal.phases import Phase
from rollplex.trace.source import Source


class Stage(Struct, frozen=True, kw_only=True):
    """A part of the start. Seconds of CLOCK_MONOTONIC."""

    name: str
    start_s: float
    end_s: float


def startup_table(journal: Path) -> list[str]:
    """The table of a run, as lines for a terminal.

    Args:
        journal: the run's journal.sqlite.

    Raises:
        JournalError: there is none, or it cannot be read.
    """
    with Source(journal) as source:
        return table(stages(source.records()))


def stages(records: Iterable[Record]) -> list[Stage]:
    """What happened up to the first iteration, by the time at which it began."""
    before: list[Record] = []
    first: list[Record] = []
    for record in records:
        if isinstance(record.event, events.IterationStarted):
            first.append(record)
            break
        before.append(record)
    found = [*_journalled(before)] or [*_guessed(before)]
    found += _evaluations(before)
    began_s = min((stage.start_s for stage in found), default=before[0].monotonic_s if before else 0.0)
    found.sort(key=lambda stage: (stage.start_s, stage.end_s))
    if first:
        found.append(Stage(name="in all, to the first iteration", start_s=began_s, end_s=first[0].monotonic_s))
    return found


def table(found: list[Stage]) -> list[str]:
    """Stages as lines."""
    if not found:
        return ["where the time before the first iteration goes: nothing is journalled"]
    zero = min(stage.start_s for stage in found)
    lines = ["where the time before the first iteration goes, s", f"{'from':>8}{'to':>8}{'took':>8}"]
    for stage in found:
        took = stage.end_s - stage.start_s
        lines.append(f"{stage.start_s - zero:8.2f}{stage.end_s - zero:8.2f}{took:8.2f}  {stage.name}")
    return lines


def _journalled(before: list[Record]) -> Iterator[Stage]:
    for record in before:
        if isinstance(event := record.event, events.StageDone):
            yield Stage(name=event.name, start_s=event.start_s, end_s=event.end_s)


def _guessed(before: list[Record]) -> Iterator[Stage]:
    run = next((r.monotonic_s for r in before if isinstance(r.event, events.RunStarted)), None)
    if run is None:
        return
    started = {r.event.service: r.monotonic_s for r in before if isinstance(r.event, events.ServiceStarted)}
    lease = next((r.monotonic_s for r in before if isinstance(r.event, events.LeaseGranted)), None)
    if started:
        yield Stage(name="processes", start_s=run, end_s=max(started.values()))
    if lease is not None:
        up_s = max(started.values(), default=run)
        yield Stage(name="input process, data check, memory plan", start_s=up_s, end_s=lease)
    for record in before:
        if isinstance(event := record.event, events.ServiceReady):
            began_s = started.get(event.service, run)
            yield Stage(name=f"{event.service} starts and loads", start_s=began_s, end_s=record.monotonic_s)
    loaded = [r.event for r in before if isinstance(r.event, events.PhaseEntered)][1:]  # LOAD comes first
    if lease is not None and loaded:
        yield Stage(name="load model, import rewards", start_s=lease, end_s=loaded[0].start_s)


def _evaluations(before: list[Record]) -> Iterator[Stage]:
    """Those of the untrained model: each is a phase, with its name in an event within it."""
    name, start_s = "evaluation", None
    for record in before:
        match record.event:
            case events.EvalStarted() | events.EvalDone() as event:
                name = f"evaluation {event.name}"
            case events.PhaseEntered() as entered:
                if start_s is not None:
                    yield Stage(name=name, start_s=start_s, end_s=entered.start_s)
                start_s = entered.start_s if entered.phase == Phase.EVAL.name else None
            case _:
                pass
