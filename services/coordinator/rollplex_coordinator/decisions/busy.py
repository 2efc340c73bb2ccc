"""How long each device had nothing to do: spans of work in, seconds out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from rollplex.protocol.common import Device


class Span(Struct, frozen=True, kw_only=True):
    """Work of a team, from its first start to its last end: CLOCK_MONOTONIC seconds."""

    devices: tuple[Device, ...]
    start_s: float
    end_s: float


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that are covered by at least one span."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def idle_s(devices: Sequence[Device], spans: Iterable[Span], seconds: float) -> dict[Device, float]:
    """Of an iteration of `seconds`, what is left of it on each device beside the spans that it has a part in."""
    found = tuple(spans)
    return {
        device: max(0.0, seconds - union_s((span.start_s, span.end_s) for span in found if device in span.devices))
        for device in devices
    }
