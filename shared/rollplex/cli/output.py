"""How commands print."""

from __future__ import annotations

from collections.abc import Sequence


def say(line: str) -> None:
    """One line on the standard output, at once."""
    print(line, flush=True)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under each other; the first row is the heading."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
