"""A few iterations of a run as lanes of spans, for a picture in the browser: what `rollplex trace` computes, as data.

Owns which part of a journal is read (by the index of started iterations, never from the beginning) and how much.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from rollplex.cli.target import JOURNAL_FILE
from rollplex.errors import JournalError
from rollplex.journal.reader import Reader, Row
from rollplex.trace import marks
from rollplex.trace.chapters import LEASES, Narrator
from rollplex.trace.marks import Chapter, Mark

MAX_ITERATIONS = 20
MAX_ROWS = 20_000
MAX_SPANS = 4_000
PART_ROWS = 1_000
_PART_BYTES = 2**20
_LEFT_OUT = frozenset({marks.ITERATIONS, marks.EVENTS, marks.WAITS, marks.STARTUP})
_INNER = "generate"
"""A decode unit whose prefill and decode are marks of their own is not drawn a second time."""


class Span(Struct, frozen=True, kw_only=True):
    """A box or, without an end, a tick. Seconds from the beginning of the timeline."""

    name: str
    kind: str
    start_s: float
    end_s: float | None
    step: int | None
    text: str = ""


class Lane(Struct, frozen=True, kw_only=True):
    """What one service, or the node itself, did."""

    name: str
    spans: list[Span]


class Timeline(Struct, frozen=True, kw_only=True):
    """Some iterations."""

    steps: list[int]
    """Those that it shows."""
    first_step: int | None
    """Of the journal."""
    last_step: int | None
    seconds: float
    phases: list[Span]
    lanes: list[Lane]
    cut: bool
    """There was more than may be shown at once."""


def read_timeline(folder: Path, first: int | None, count: int) -> Timeline:
    """The iterations from `first` on; None: the last ones.

    Args:
        count: at most so many, up to MAX_ITERATIONS.

    Raises:
        JournalError: the run has no journal, or it cannot be read.
    """
    path = folder / JOURNAL_FILE
    if path.is_symlink() or not path.is_file():
        raise JournalError("this run has no journal", needed=JOURNAL_FILE, where=str(path))
    with Reader(path) as reader:
        ends = reader.step_range()
        if ends is None:
            return Timeline(steps=[], first_step=None, last_step=None, seconds=0.0, phases=[], lanes=[], cut=False)
        first = max(ends[0], ends[1] - count + 1) if first is None else first
        steps = reader.steps(first, min(count, MAX_ITERATIONS))
        rows, cut = _rows(reader, steps) if steps else ([], False)
    return _timeline(_chapters(rows), steps, ends, cut=cut)


def _rows(reader: Reader, steps: list[int]) -> tuple[list[Row], bool]:
    """From the start of the first of these iterations to the start of the one after the last."""
    begin = reader.start_of(steps[0])
    end = reader.start_after(steps[-1])
    rows: list[Row] = []
    after = begin - 1
    while len(rows) <= MAX_ROWS and (part := reader.rows_after(after, PART_ROWS, _PART_BYTES)):
        rows += [row for row in part if end is None or row.id < end]
        after = part[-1].id
        if end is not None and after >= end:
            break
    return rows[:MAX_ROWS], len(rows) > MAX_ROWS


def _chapters(rows: list[Row]) -> list[Chapter]:
    narrator = Narrator()
    chapters: list[Chapter] = []
    if rows:
        narrator.begin(rows[0].monotonic_s)
    for row in rows:
        if row.type not in LEASES:
            chapters += narrator.tell(row.record())
    return [*chapters, *narrator.end()]


def _timeline(chapters: list[Chapter], steps: list[int], ends: tuple[int, int], *, cut: bool) -> Timeline:
    kept = [(chapter.step, mark) for chapter in chapters for mark in chapter.marks if mark.track not in _LEFT_OUT]
    decoded = {mark.track for _, mark in kept if mark.kind == "decode"}
    kept = [(step, mark) for step, mark in kept if mark.kind != _INNER or mark.track not in decoded]
    zero = min((mark.start_ns for _, mark in kept), default=0)
    last = max((mark.start_ns if mark.end_ns is None else mark.end_ns for _, mark in kept), default=0)
    tracks: dict[str, list[Span]] = {}
    for step, mark in kept[:MAX_SPANS]:
        tracks.setdefault(mark.track, []).append(_span(mark, step, zero))
    phases = tracks.pop(marks.PHASES, [])
    return Timeline(
        steps=steps,
        first_step=ends[0],
        last_step=ends[1],
        seconds=(last - zero) / 1e9,
        phases=phases,
        lanes=[Lane(name=name, spans=spans) for name, spans in sorted(tracks.items())],
        cut=cut or len(kept) > MAX_SPANS,
    )


def _span(mark: Mark, step: int | None, zero: int) -> Span:
    return Span(
        name=mark.name,
        kind=mark.kind,
        start_s=(mark.start_ns - zero) / 1e9,
        end_s=None if mark.end_ns is None else (mark.end_ns - zero) / 1e9,
        step=step,
        text=", ".join(f"{name} {value}" for name, value in mark.args if name in {"groups", "row", "mean"}),
    )
