"""Tables of texts, plain and in Markdown. Knows nothing of benches."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Table(Struct, frozen=True, kw_only=True):
    """Every row has as many cells as the head; the first column is left-aligned, the others right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plain(table: Table) -> list[str]:
    """Lines with aligned columns."""
    lines = (table.head, *table.rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]
    return [_line(line, widths) for line in lines]


def markdown(table: Table) -> list[str]:
    """Lines of a Markdown table."""
    rule = ("---", *("---:" for _ in table.head[1:]))
    return [f"| {' | '.join(cells)} |" for cells in (table.head, rule, *table.rows)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]).rstrip()
