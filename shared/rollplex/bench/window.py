"""What it costs and gains to run prefix work beside the rollout, from the rows of serial and overlap. Pure.

    ratio     (rollout alone + the prefix work that was done beside it, alone) / rollout with that work beside it
    slowdown  rollout with work beside it / rollout alone

A ratio of 1 is what taking turns would give; below, the two hinder each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from rollplex.bench.summary import ModeSummary


class Window(Struct, frozen=True, kw_only=True):
    """Of one kind of prefix. Seconds of one iteration."""

    prefix: str
    rollout_alone_s: float
    prefix_alone_s: float
    """All prefix forwards, under serial."""
    rollout_beside_s: float
    """Under overlap."""
    work_hidden: float
    """Part of the prefix forwards that was done beside it."""

    @property
    def ratio(self) -> float:
        return (self.rollout_alone_s + self.work_hidden * self.prefix_alone_s) / self.rollout_beside_s

    @property
    def slowdown(self) -> float:
        return self.rollout_beside_s / self.rollout_alone_s


def windows(modes: Sequence[ModeSummary]) -> tuple[Window, ...]:
    """One for each kind of prefix that has rows of both, measured with the same number of prompts."""
    found = []
    by_name = {(mode.schedule, mode.prefix): mode for mode in modes}
    for prefix in dict.fromkeys(mode.prefix for mode in modes):
        serial, overlap = by_name.get(("serial", prefix)), by_name.get(("overlap", prefix))
        if serial is None or overlap is None or serial.prompts != overlap.prompts:
            continue
        found.append(
            Window(
                prefix=prefix,
                rollout_alone_s=serial.seconds["generate"].median,
                prefix_alone_s=serial.seconds["prefix_forward"].median,
                rollout_beside_s=overlap.seconds["generate"].median,
                work_hidden=overlap.work_hidden.median,
            )
        )
    return tuple(found)
