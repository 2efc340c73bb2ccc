"""Numbers as people read them. Pure."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: int) -> str:
    """Three digits and a unit: "1.46 GiB"."""
    value, unit = float(num_bytes), 0
    while value >= 1000.0 and unit + 1 < len(_UNITS):
        value, unit = value / 1024.0, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Two units at most: "9 s", "1 min 05 s", "2 h 03 min", "3 d 04 h"."""
    whole = round(seconds)
    for below, unit, part, name in (
        (3600, 60, 1, ("min", "s")),
        (86_400, 3600, 60, ("h", "min")),
    ):
        if 60 <= whole < below:
            return f"{whole // unit} {name[0]} {whole % unit // part:02d} {name[1]}"
    return f"{whole} s" if whole < 60 else f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def brief(seconds: float) -> str:
    """A short time: "0.052", "1.25", "123"."""
    return f"{seconds:.3f}" if seconds < 1.0 else f"{seconds:.2f}" if seconds < 100.0 else f"{seconds:.0f}"
