"""What sharing and overlap could gain at most, from counts and from what was measured. Pure; makes no sentences."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from rollplex.bench.facts import Facts
from rollplex.bench.summary import COMPARED, ModeSummary, token_ceiling


class SharingCeiling(Struct, frozen=True, kw_only=True):
    """Of scoring and training; the rollout is the same with and without sharing."""

    tokens: float
    """G (P + R) / (P + G R): by tokens through the language model."""
    unit_times: float | None
    """By the time of units of `serial shared`, if G times the prefix took G times as long; None without that mode."""


class HidingCeiling(Struct, frozen=True, kw_only=True):
    """Of one kind of prefix, from its serial rows. Seconds of one iteration."""

    prefix: str
    prefix_s: float
    """Prefix forwards, which overlap may move into the rollout."""
    work_s: float
    """SCORE and TRAIN, which stream may move there as far as groups end early."""
    rollout_s: float
    overlap: float
    stream: float
    """Gains if all that fits were hidden, and cost nothing there."""

    @property
    def overlap_s(self) -> float:
        """Seconds that overlap can hide."""
        return min(self.prefix_s, self.rollout_s)


def sharing_ceiling(modes: Sequence[ModeSummary], facts: Facts) -> SharingCeiling:
    """By tokens, and by units where `serial shared` was measured."""
    g = facts.group_size
    response_tokens = modes[0].response_tokens
    serial = _serial(modes, "shared")
    times = None
    if serial is not None:
        prefix = serial.seconds["prefix_forward"].median + serial.seconds["prefix_backward"].median
        rest = serial.seconds["score_units"].median + serial.seconds["suffix_units"].median
        times = (g * prefix + rest) / (prefix + rest)
    return SharingCeiling(tokens=token_ceiling(facts.prompt_tokens, response_tokens, g), unit_times=times)


def hiding_ceilings(modes: Sequence[ModeSummary]) -> tuple[HidingCeiling, ...]:
    """One for each kind of prefix that has serial rows."""
    found = []
    for prefix in dict.fromkeys(mode.prefix for mode in modes):
        serial = _serial(modes, prefix)
        if serial is None:
            continue
        whole, rollout, forward, work = (
            serial.seconds[name].median for name in ("iteration", "rollout", "prefix_forward", COMPARED)
        )
        found.append(
            HidingCeiling(
                prefix=prefix,
                prefix_s=forward,
                work_s=work,
                rollout_s=rollout,
                overlap=whole / (whole - min(forward, rollout)),
                stream=whole / (whole - min(work, rollout)),
            )
        )
    return tuple(found)


def _serial(modes: Sequence[ModeSummary], prefix: str) -> ModeSummary | None:
    return next((mode for mode in modes if (mode.schedule, mode.prefix) == ("serial", prefix)), None)
