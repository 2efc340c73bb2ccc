"""What benches print beside their rows: the folder that is kept, a table, notes to it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rollplex.bench.tables import Table, plain
from rollplex.bench.tables import markdown as in_markdown
from rollplex.cli.output import say
from rollplex.cli.start import fresh, timestamp

EXIT_FAILED = 1


def folder_of(out: Path | None, runs_dir: Path, name: str) -> Path:
    """The bench's folder, absolute: `out`, or a new one in `runs_dir` with the bench's name."""
    return (out or fresh(runs_dir, f"{name}-{timestamp()}")).absolute()


def show(table: Table, notes: Iterable[str], *, markdown: bool) -> None:
    """Print a table, and notes below it."""
    for line in in_markdown(table) if markdown else plain(table):
        say(line)
    say("")
    for line in notes:
        say(f"- {line}" if markdown else line)
