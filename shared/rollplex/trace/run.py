"""`rollplex trace`: from a run directory to the trace file, the picture and the tables.

Owns which iterations are taken and what is said. A file has its name only once it is whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rollplex.errors import RollplexError
from rollplex.trace.perfetto import TraceWriter, Written
from rollplex.trace.picture import draw, require_drawable
from rollplex.trace.source import Source
from rollplex.trace.steps import Steps, newest, parse_steps, ranges, span
from rollplex.trace.where import PHASES, WARM_UP, WHOLE, Seconds, startup_table, table, times
from rollplex.whole_file import whole_file

MAX_ITERATIONS = 2_000
"""Taken when none are named: what the viewer still opens at once (some 20 to 60 MB)."""
TRACE_FILE = "trace.perfetto-trace"
VIEWER = "https://ui.perfetto.dev"
_TYPICAL = 2


def write_trace(
    run_dir: Path, *, steps: str | None, output: Path | None, svg: Path | None, say: Callable[[str], None]
) -> None:
    """Write what was asked for and say where the time went.

    Args:
        run_dir: of a run that has ended, was killed, or goes on.
        steps: `--steps`; None: all, at most the newest `MAX_ITERATIONS`.
        output: the trace file; None: in the run directory.
        svg: the picture; None: none.
        say: prints a line.

    Raises:
        ConfigError: no such iterations, or they make no picture.
        JournalError: the run has no journal, or an empty one.
    """
    journal = run_dir / "journal.sqlite"
    with Source(journal) as source:
        wanted = newest(source.steps, MAX_ITERATIONS) if steps is None else parse_steps(steps)
        found = source.require(wanted)
        if svg is not None and steps is not None:
            require_drawable(len(found))
        name = run_dir.name if source.run is None else f"{source.run.run} ({source.run.schedule})"
        path = output or run_dir / TRACE_FILE
        written, taken = _write(source, wanted, path, f"rollplex {name}")
        say(f"{path}: {_contents(found, written)}; open it at {VIEWER} (the file stays on this machine)")
        for line in _left_out(source, found):
            say(line)
        if svg is not None:
            picture = _typical(taken) if steps is None else wanted
            chapters = [chapter for chapter in source.chapters(picture, memory=False) if chapter.done]
            drawn = draw(chapters, name)
            with _whole(svg) as file:
                file.write(drawn.encode())
            say(f"{svg}: {span([c.step for c in chapters if c.step is not None])}")
    for line in ("", *table([iteration for _, iteration in taken]), "", *startup_table(journal)):
        say(line)


def _write(source: Source, steps: Steps, path: Path, name: str) -> tuple[Written, list[tuple[int, dict[str, Seconds]]]]:
    """The file; what it has in it, and the times of every finished iteration by its step."""
    taken: list[tuple[int, dict[str, Seconds]]] = []
    with _whole(path) as file:
        writer = TraceWriter(file, name, wall_s=source.first.wall_s, monotonic_s=source.first.monotonic_s)
        for chapter in source.chapters(steps):
            writer.write(chapter)
            if chapter.done and chapter.step is not None:
                taken.append((chapter.step, times(chapter)))
    return writer.written, taken


def _typical(taken: list[tuple[int, dict[str, Seconds]]]) -> Steps:
    """Neighbours that took about as long as the median: what a picture should show."""
    steps = taken[WARM_UP:] if len(taken) > WARM_UP + _TYPICAL else taken
    if not steps:
        return Steps()
    lengths = [sum(times[phase.name][WHOLE] for phase in PHASES) for _, times in steps]
    median = statistics.median(lengths)
    last = max(1, len(steps) - _TYPICAL + 1)
    first = min(range(last), key=lambda at: max(abs(length - median) for length in lengths[at : at + _TYPICAL]))
    return Steps(first=steps[first][0], end=steps[min(first + _TYPICAL, len(steps)) - 1][0] + 1)


def _contents(found: list[int], written: Written) -> str:
    size = written.size_bytes
    shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{math.ceil(size / 1e3)} kB"
    return f"{span(found)}, {written.slices} slices, {written.arrows} arrows, {shown}"


def _left_out(source: Source, found: list[int]) -> Iterator[str]:
    kept = set(found)
    if left := [step for step in source.steps if step not in kept]:
        yield f"left out: {len(left)} of {len(source.steps)} iterations ({ranges(left)}); --steps A:B chooses"
    if source.left_out:
        yield f"left out: {source.left_out} events from before this host was last started; its clock began anew then"


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name, in place of what had it before, when all is written."""
    try:
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise RollplexError("cannot write the file", got=str(error), where=str(path)) from error
