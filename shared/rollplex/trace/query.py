"""Questions to a trace file: its tracks, slices and flows, and which slices lie inside which.

Trusts the file; `rollplex.trace.validate` says whether it may be trusted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from rollplex.trace.packets import packets


class Track(Struct, frozen=True, kw_only=True):
    """A track as the file describes it. `parent`: id of the track above it."""

    uuid: int
    name: str
    parent: int | None = None


class Slice(Struct, kw_only=True, eq=False):
    """A slice, or (`end_ns` equal to `start_ns`, `moment`) something that happened at once."""

    track: Track
    name: str
    kind: str
    start_ns: int
    end_ns: int
    depth: int
    """How many slices it lies in."""
    moment: bool = False
    args: dict[str, str | int | float | bool] = field(default_factory=dict)
    flows: tuple[int, ...] = ()
    """Ids of the flows that pass through it, begin or end here."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def within(self, outer: Slice) -> bool:
        """Whether it begins and ends while the other one lasts."""
        return outer.start_ns <= self.start_ns and self.end_ns <= outer.end_ns


class Trace(Struct, kw_only=True):
    """A trace file in memory."""

    tracks: dict[int, Track] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    """In the order of their beginnings in the file; moments too."""
    counters: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """By track: times in ns and values."""

    def named(self, name: str) -> list[Slice]:
        """Slices of this name, with or without a number after it: "actor prefix" finds "actor prefix 3"."""
        return [one for one in self.slices if one.name == name or _base(one.name) == name]

    def on(self, track: str) -> list[Slice]:
        """Slices of the tracks with this name."""
        return [one for one in self.slices if one.track.name == track]

    def inside(self, inner: str, outer: str) -> list[Slice]:
        """Slices named `inner` that lie inside any one slice named `outer`, of whatever track."""
        outers = self.named(outer)
        return [one for one in self.named(inner) if any(one.within(other) for other in outers)]

    def arrows(self) -> list[tuple[Slice, Slice]]:
        """Every arrow, from slice to slice: a flow goes through its slices in the order of time."""
        passed: dict[int, list[Slice]] = {}
        for one in sorted(self.slices, key=lambda one: one.start_ns):
            for flow in one.flows:
                passed.setdefault(flow, []).append(one)
        return [pair for chain in passed.values() for pair in itertools.pairwise(chain)]


def read(path: Path) -> Trace:
    """A trace file.

    Raises:
        TraceError: it is not whole.
    """
    trace = Trace()
    unfinished: dict[int, list[Slice]] = {}
    for packet in packets(path):
        if packet.HasField("track_descriptor"):
            found = packet.track_descriptor
            parent = found.parent_uuid if found.HasField("parent_uuid") else None
            trace.tracks[found.uuid] = Track(uuid=found.uuid, name=found.name, parent=parent)
        elif packet.HasField("track_event"):
            event = packet.track_event
            _event(trace, packet.timestamp, event, unfinished.setdefault(event.track_uuid, []))
    return trace


def _event(trace: Trace, at_ns: int, event: Any, unfinished: list[Slice]) -> None:
    if event.type == event.TYPE_COUNTER:
        value = event.double_counter_value if event.HasField("double_counter_value") else event.counter_value
        trace.counters.setdefault(event.track_uuid, []).append((at_ns, value))
    elif event.type == event.TYPE_SLICE_END:
        unfinished.pop().end_ns = at_ns
    else:
        one = Slice(
            track=trace.tracks[event.track_uuid],
            name=event.name,
            kind=next(iter(event.categories), ""),
            start_ns=at_ns,
            end_ns=at_ns,
            depth=len(unfinished),
            moment=event.type == event.TYPE_INSTANT,
            args=_args(event.debug_annotations),
            flows=(*event.flow_ids, *event.terminating_flow_ids),
        )
        trace.slices.append(one)
        if not one.moment:
            unfinished.append(one)


def _args(annotations: Iterable[Any]) -> dict[str, str | int | float | bool]:
    return {one.name: getattr(one, one.WhichOneof("value")) for one in annotations if one.WhichOneof("value")}


def _base(name: str) -> str:
    """The name without a number at its end."""
    words, _, last = name.rpartition(" ")
    return words if last.isdigit() else name
