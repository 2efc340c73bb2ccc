"""The result of a bench, as it is kept and printed. Knows rows only through their summaries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct

from rollplex.bench.ceilings import HidingCeiling, SharingCeiling
from rollplex.bench.facts import Facts
from rollplex.bench.folder import Made
from rollplex.bench.summary import Gain, ModeSummary
from rollplex.bench.window import Window
from rollplex.whole_file import write_whole


class Result(Struct, frozen=True, kw_only=True):
    """Everything that a report says."""

    date: str
    """When the last row began; UTC."""
    command: str
    made: Made
    facts: Facts
    repeats: int
    modes: tuple[ModeSummary, ...]
    gains: tuple[Gain, ...]
    sharing: SharingCeiling
    hiding: tuple[HidingCeiling, ...]
    unlike: tuple[str, ...]
    """Schedules of one kind of prefix whose weights differ in the end; none, or there is an error."""
    others_cpus: float
    """How many processors other programs kept busy, mean over the rows."""
    windows: tuple[Window, ...] = ()
    missing: int = 0
    """Rows that are not measured yet."""

    @property
    def compares_bits(self) -> bool:
        """Whether schedules are held to the same bits: on hosts. On a GPU `rollplex bench gradients` compares."""
        device = cast("Mapping[str, object]", self.made.config.get("device", {}))
        return device.get("kind", "host") == "host"

    @property
    def exact(self) -> bool:
        """Whether all schedules of one kind of prefix ended with the same weights."""
        return not (self.unlike and self.compares_bits)


def write_result(result: Result, file: Path) -> None:
    """Write result.json."""
    write_whole(file, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n", durable=True)
