"""The ledger as text: what an error, the log and the terminal show. Sizes are exact, in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from rollplex_coordinator.decisions.leases import DeviceView, LedgerView


def table(view: LedgerView) -> str:
    """One block of lines per device: a summary, then leases, reservations and the queue."""
    return "\n".join(_device(device, view.phase) for device in view.devices)


def align(rows: Sequence[Sequence[str]], *, indent: int = 2) -> str:
    """Columns; those of numbers (or nothing) go to the right; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = [
        all(_is_number(row[column]) for row in rows[1:]) and any(row[column] for row in rows[1:])
        for column in range(len(rows[0]))
    ]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        lines.append(" " * indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def number(size_bytes: int) -> str:
    """Exact, with thousands marked."""
    return f"{size_bytes:,}"


def _is_number(cell: str) -> bool:
    return not cell or cell.replace(",", "").isdigit()


def _device(device: DeviceView, phase: str) -> str:
    summary = (
        f"device {device.device} in {phase}: budget {number(device.budget_bytes)}, held {number(device.held_bytes)}, "
        f"set aside {number(device.reserved_bytes)}, free {number(device.free_bytes)} bytes"
    )
    lines = [summary]
    if device.leases:
        leases = [("lease", "bytes", "kind", "held by", "last used by", "until", "for")]
        leases += [
            (str(x.id), number(x.size_bytes), x.kind, x.producer, x.last_consumer, x.last.name, x.purpose)
            for x in device.leases
        ]
        lines.append(align(leases))
    if device.reservations:
        reserved = [("reservation", "bytes", "drawn", "phases")]
        reserved += [
            (x.name, number(x.size_bytes), number(x.drawn_bytes), " ".join(x.phases)) for x in device.reservations
        ]
        lines.append(align(reserved))
    if device.waiting:
        waiting = [("waits", "bytes", "kind", "for", "wanted by")]
        waiting += [
            (str(x.request), number(block.size_bytes), block.kind, block.purpose, block.producer)
            for x in device.waiting
            for block in x.blocks
        ]
        lines.append(align(waiting))
    return "\n".join(lines)
