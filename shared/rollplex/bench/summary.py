"""From rows to medians, spreads and gains. Pure; makes no sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from rollplex.bench.rows import Mode, Row, practised

COMPARED: Final = "score_and_train"
"""SCORE and TRAIN together: what sharing makes less. Under `serial` it holds all prefix work too."""


class Spread(Struct, frozen=True, kw_only=True):
    """Of one number over the repeats."""

    median: float
    low: float
    high: float
    count: int

    @property
    def width(self) -> float:
        """From the lowest to the highest, as a part of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


class ModeSummary(Struct, frozen=True, kw_only=True):
    """What one mode did. seconds: by the names of `Row.median_s`, and `score_and_train`."""

    schedule: str
    prefix: str
    seconds: dict[str, Spread]
    hidden_share: Spread
    response_tokens: float
    digests: tuple[str, ...]
    """Different digests of its rows: one, if the mode gives the same bits each time."""
    work_hidden: Spread
    decode_tokens_s: Spread
    prefix_tokens_s: Spread
    peak_bytes: dict[str, int]
    """By phase, over all rows; none on a host."""
    prompts: int
    """Of one measured iteration; 0: not told."""

    @property
    def mode(self) -> Mode:
        return Mode(schedule=self.schedule, prefix=self.prefix)


class Gain(Struct, frozen=True, kw_only=True):
    """How much less time one mode takes than another."""

    name: str
    base: Mode
    other: Mode
    what: str
    """Name of the seconds that are compared."""
    gain: float
    """Median of the base through median of the other; above 1 is faster."""
    low: float
    high: float
    """Of the gains of single repeats."""
    noise: float
    """The larger spread of the two, as a part of the median; 0 with a single repeat, where it is not known."""
    repeats: int

    @property
    def within_noise(self) -> bool:
        """Whether the spread between repeats is larger than the gain."""
        return self.repeats > 1 and abs(self.gain - 1.0) <= self.noise


_MODES: Final = {
    f"{schedule} {prefix}": Mode(schedule=schedule, prefix=prefix)
    for schedule in ("serial", "overlap", "stream")
    for prefix in ("shared", "replicated")
} | {practised().name: practised()}
_GAINS: Final = (
    ("sharing alone", "serial replicated", "serial shared", "iteration"),
    ("sharing alone, scoring and training only", "serial replicated", "serial shared", COMPARED),
    ("overlap alone, prefixes shared", "serial shared", "overlap shared", "iteration"),
    ("overlap alone, prefixes replicated", "serial replicated", "overlap replicated", "iteration"),
    ("stream alone, prefixes shared", "serial shared", "stream shared", "iteration"),
    ("stream alone, prefixes replicated", "serial replicated", "stream replicated", "iteration"),
    ("sharing and overlap", "serial replicated", "overlap shared", "iteration"),
    ("sharing and stream", "serial replicated", "stream shared", "iteration"),
    ("one copy of the weights, serial replicated", "practised replicated", "serial replicated", "iteration"),
    ("overlap shared, over serial as practised", "practised replicated", "overlap shared", "iteration"),
    ("stream shared, over serial as practised", "practised replicated", "stream shared", "iteration"),
)


def summarise(rows: Iterable[Row], modes: Sequence[Mode]) -> tuple[ModeSummary, ...]:
    """One summary for each mode that has rows, in the order of `modes`."""
    rows = list(rows)
    found = [(mode, [row for row in rows if row.mode == mode]) for mode in modes]
    return tuple(_summary(mode, group) for mode, group in found if group)


def gains(rows: Sequence[Row]) -> tuple[Gain, ...]:
    """Every gain of which both modes have rows. Sharing and overlap are never mixed but where the name says so."""
    found = []
    for name, base, other, what in _GAINS:
        left = {row.repeat: _seconds(row, what) for row in rows if row.mode == _MODES[base]}
        right = {row.repeat: _seconds(row, what) for row in rows if row.mode == _MODES[other]}
        if not left or not right:
            continue
        one, two = _spread(left.values()), _spread(right.values())
        pairs = [left[repeat] / right[repeat] for repeat in left if repeat in right] or [one.median / two.median]
        found.append(
            Gain(
                name=name,
                base=_MODES[base],
                other=_MODES[other],
                what=what,
                gain=one.median / two.median,
                low=min(pairs),
                high=max(pairs),
                noise=max(one.width, two.width),
                repeats=min(one.count, two.count),
            )
        )
    return tuple(found)


def token_ceiling(prompt_tokens: float, response_tokens: float, group_size: int) -> float:
    """G (P + R) / (P + G R): tokens through the language model without sharing, through those with it."""
    p, r, g = prompt_tokens, response_tokens, group_size
    return g * (p + r) / (p + g * r)


def unlike(summaries: Sequence[ModeSummary]) -> list[str]:
    """For each kind of prefix whose rows do not all end with the same weights: which digests were seen where."""
    problems = []
    for prefix in dict.fromkeys(summary.prefix for summary in summaries):
        seen = {summary.schedule: summary.digests for summary in summaries if summary.prefix == prefix}
        if len({digest for digests in seen.values() for digest in digests if digest}) > 1:
            parts = [f"{schedule} {', '.join(d[:12] for d in digests)}" for schedule, digests in seen.items()]
            problems.append(f"{prefix}: {'; '.join(parts)}")
    return problems


def _summary(mode: Mode, rows: Sequence[Row]) -> ModeSummary:
    names = [name for name in rows[0].median_s if all(name in row.median_s for row in rows)]
    return ModeSummary(
        schedule=mode.schedule,
        prefix=mode.prefix,
        seconds={name: _spread(_seconds(row, name) for row in rows) for name in (*names, COMPARED)},
        hidden_share=_spread(row.hidden_share for row in rows),
        response_tokens=statistics.fmean(row.response_tokens for row in rows),
        digests=tuple(dict.fromkeys(row.digest for row in rows)),
        work_hidden=_spread(row.work_hidden for row in rows),
        decode_tokens_s=_spread(row.decode_tokens_s for row in rows),
        prefix_tokens_s=_spread(row.prefix_tokens_s for row in rows),
        peak_bytes={
            phase: max(row.peak_bytes.get(phase, 0) for row in rows)
            for phase in dict.fromkeys(phase for row in rows for phase in row.peak_bytes)
        },
        prompts=max(row.prompts for row in rows),
    )


def _seconds(row: Row, name: str) -> float:
    return row.median_s["score"] + row.median_s["train"] if name == COMPARED else row.median_s[name]


def _spread(values: Iterable[float]) -> Spread:
    numbers = list(values)
    return Spread(median=statistics.median(numbers), low=min(numbers), high=max(numbers), count=len(numbers))
