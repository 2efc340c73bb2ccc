"""Where the time of an iteration goes: per phase, how long each service was busy, and how long nobody was.

Pure functions over chapters; `iteration_table` is the one that opens a journal. Medians: one slow iteration moves
nothing, but the medians of parts need not add up to the median of the whole.

The journal knows a service as busy from the start to the end of each unit, reward and optimizer step. What it has no
event for counts as nobody's: messages, the coordinator, the journal's disk writes, drains.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from rollplex.journal.events import UnitKind
from rollplex.journal.phases import Phase
from rollplex.trace import marks
from rollplex.trace.marks import Chapter, Mark, role_of
from rollplex.trace.source import Source
from rollplex.trace.startup import startup_table
from rollplex.trace.steps import Steps

__all__ = ["covered_ns", "hidden_share", "iteration_table", "startup_table", "table", "times"]

WARM_UP = 3
"""Iterations at the beginning that are left out where there are enough others: caches and allocators are cold."""
PHASES = (Phase.IDLE, Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN, Phase.UPDATE)
"""Those of every iteration. IDLE: from the end of the one before to the first token."""
SERVICES = ("rollout", "prefix", "trainer", marks.REWARDS)
WHOLE, NOBODY = "whole", "nobody"
_WORK = {*(kind.value for kind in UnitKind), "reward", "optimizer"}
_COLUMNS: tuple[str, ...] = (WHOLE, *SERVICES, NOBODY)

_Span: TypeAlias = tuple[int, int]
Seconds: TypeAlias = dict[str, float]
"""By column: `whole`, each service, `nobody`."""


def iteration_table(journal: Path) -> list[str]:
    """The table of a run, as lines for a terminal.

    Args:
        journal: the run's journal.sqlite.

    Raises:
        JournalError: there is none, or it cannot be read.
    """
    with Source(journal) as source:
        return table([times(chapter) for chapter in source.chapters(Steps(), memory=False) if chapter.done])


def times(chapter: Chapter) -> dict[str, Seconds]:
    """Seconds of one iteration, by the names of `PHASES` and then by column."""
    work: dict[str, list[_Span]] = {}
    for mark in chapter.marks:
        if mark.kind in _WORK and mark.end_ns is not None:
            work.setdefault(role_of(mark.track), []).append((mark.start_ns, mark.end_ns))
    everybody = [span for spans in work.values() for span in spans]
    found: dict[str, Seconds] = {}
    for phase in PHASES:
        spans = _spans_of(chapter, phase)
        row: Seconds = dict.fromkeys(_COLUMNS, 0.0)
        for start, end in spans:
            row[WHOLE] += (end - start) / 1e9
            row[NOBODY] += (end - start - covered_ns(everybody, start, end)) / 1e9
            for service in SERVICES:
                row[service] += covered_ns(work.get(service, []), start, end) / 1e9
        found[phase.name] = row
    return found


def hidden_share(chapters: Iterable[Chapter]) -> float | None:
    """The part of the time of prefix forward passes that lies between the start of its iteration's first decode unit
    and the end of the last, as time/prefix_in_window has it; None without prefix passes."""
    total = inside = 0
    for chapter in chapters:
        rollout = chapter.of(UnitKind.GENERATE)
        spans = [_span(m) for kind in (UnitKind.REFERENCE_PREFIX, UnitKind.ACTOR_PREFIX) for m in chapter.of(kind)]
        total += sum(end - start for start, end in spans)
        if rollout:
            window = min(m.start_ns for m in rollout), max(_span(m)[1] for m in rollout)
            inside += sum(max(0, min(end, window[1]) - max(start, window[0])) for start, end in spans)
    return inside / total if total else None


def covered_ns(spans: Sequence[_Span], start: int, end: int) -> int:
    """How much of start..end lies in at least one of the spans."""
    covered, reached = 0, start
    for first, last in sorted(spans):
        if min(last, end) > max(first, reached):
            covered += min(last, end) - max(first, reached)
            reached = min(last, end)
    return covered


def table(iterations: Sequence[dict[str, Seconds]]) -> list[str]:
    """Medians of what `times` gives, as lines; one line where there is no iteration."""
    if not iterations:
        return ["where the time goes: no iteration is finished yet"]
    warm_up = WARM_UP if len(iterations) > 2 * WARM_UP else 0
    counted = iterations[warm_up:]
    rows = {name: _medians([times[name] for times in counted]) for name in counted[0]}
    total = _medians([{c: sum(row[c] for row in times.values()) for c in _COLUMNS} for times in counted])
    scale, unit = (1.0, "s") if total[WHOLE] >= 10 else (1e3, "ms")
    left_out = f", the first {warm_up} left out" if warm_up else ""
    number = f"{len(counted)} iteration{'s'[: len(counted) != 1]}{left_out}"
    lines = [f"where the time of an iteration goes: median of {number}, {unit}"]
    lines.append(f"{'':11}{WHOLE:>9}{'share':>8}" + "".join(f"{name:>9}" for name in (*SERVICES, NOBODY)))
    for name, row in [*rows.items(), ("iteration", total)]:
        share = row[WHOLE] / total[WHOLE] if total[WHOLE] else 0.0
        cells = "".join(f"{row[column] * scale:9.1f}" for column in (*SERVICES, NOBODY))
        lines.append(f"{name:11}{row[WHOLE] * scale:9.1f}{share:8.0%}{cells}")
    return [*lines, "(nobody: no unit, reward or optimizer step runs; messages, coordinator, journal)"]


def _spans_of(chapter: Chapter, phase: Phase) -> list[_Span]:
    phases = chapter.of("phase")
    spans = [_span(mark) for mark in phases if mark.name == phase.name]
    if phase is not Phase.IDLE:
        return spans
    first = min((mark.start_ns for mark in phases if mark.name == Phase.ROLLOUT.name), default=0)
    return [span for span in spans if span[1] <= first]


def _span(mark: Mark) -> _Span:
    return mark.start_ns, mark.start_ns if mark.end_ns is None else mark.end_ns


def _medians(rows: Sequence[Seconds]) -> Seconds:
    return {column: statistics.median(row[column] for row in rows) for column in rows[0]}
