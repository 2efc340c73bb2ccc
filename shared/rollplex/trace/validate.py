"""Whether a trace file keeps to what Perfetto needs, checked on the packets themselves.

What breaks one of these rules Perfetto does not refuse: it drops the event, or draws it wrongly, and only counts that
somewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from rollplex.trace.packets import packets

_INTERNED = ("name_iid", "category_iids", "correlation_id_str_iid", "source_location_iid", "callstack_iid")


class _TrackState(Struct):
    counter: bool
    at_ns: int = -1
    open: list[str] = field(default_factory=list)


class _Flow(Struct):
    events: int = 0
    first_ns: int = 2**63
    last_ns: int = -1
    ends: list[int] = field(default_factory=list)


def problems(path: Path, limit: int = 50) -> list[str]:
    """What is wrong with a trace file; empty for a good one.

    Raises:
        TraceError: it is not a whole trace.
    """
    checker = _Checker()
    found: list[str] = []
    for number, packet in enumerate(packets(path)):
        found += [f"packet {number}: {problem}" for problem in checker.packet(packet)]
        if len(found) >= limit:
            return found[:limit]
    return [*found, *checker.end()][:limit]


class _Checker:
    def __init__(self) -> None:
        self._tracks: dict[int, _TrackState] = {}
        self._flows: dict[int, _Flow] = {}
        self._clocks: set[int] = set()

    def packet(self, packet: Any) -> Iterator[str]:
        """Problems of one packet, as it follows those before it."""
        yield from (f"unknown field {name}" for name in _unknown(packet))
        if not packet.trusted_packet_sequence_id:
            yield "no trusted_packet_sequence_id"
        if packet.HasField("interned_data") or packet.sequence_flags:
            yield "interned data or sequence flags, which this trace does without"
        if packet.HasField("clock_snapshot"):
            yield from self._snapshot(packet.clock_snapshot)
        if packet.HasField("track_descriptor"):
            yield from self._descriptor(packet.track_descriptor)
        if packet.HasField("track_event"):
            yield from self._clocked(packet)
            yield from self._event(packet.timestamp, packet.track_event)

    def end(self) -> Iterator[str]:
        """Problems of the whole."""
        for uuid, track in self._tracks.items():
            if track.open:
                yield f"track {uuid}: {track.open} never ended"
        for number, flow in self._flows.items():
            if flow.events < 2:
                yield f"flow {number} has one end only"
            if len(flow.ends) != 1:
                yield f"flow {number} ends {len(flow.ends)} times"
            elif flow.ends[0] != flow.last_ns:
                yield f"flow {number} ends at {flow.ends[0]}, but goes on to {flow.last_ns}"

    def _snapshot(self, snapshot: Any) -> Iterator[str]:
        self._clocks |= {clock.clock_id for clock in snapshot.clocks}
        if snapshot.primary_trace_clock not in self._clocks:
            yield f"the snapshot does not have the trace's clock {snapshot.primary_trace_clock}"

    def _descriptor(self, track: Any) -> Iterator[str]:
        if track.uuid in self._tracks or not track.uuid:
            yield f"track {track.uuid} is described twice, or has no id"
        if not track.name:
            yield f"track {track.uuid} has no name"
        if track.HasField("parent_uuid") and track.parent_uuid not in self._tracks:
            yield f"track {track.uuid} ({track.name}): its parent {track.parent_uuid} is not described before it"
        self._tracks[track.uuid] = _TrackState(counter=track.HasField("counter"))

    def _clocked(self, packet: Any) -> Iterator[str]:
        if not packet.HasField("timestamp"):
            yield "an event without timestamp"
        if packet.timestamp_clock_id not in self._clocks:
            yield f"clock {packet.timestamp_clock_id} is in no snapshot before"

    def _event(self, at_ns: int, event: Any) -> Iterator[str]:
        track = self._tracks.get(event.track_uuid)
        if track is None:
            yield f"track {event.track_uuid} is not described"
            return
        if at_ns < track.at_ns:
            yield f"track {event.track_uuid} goes back from {track.at_ns} to {at_ns}"
        track.at_ns = at_ns
        yield from (f"{name}, which nothing defines" for name in _INTERNED if _is_set(event, name))
        if track.counter != (event.type == event.TYPE_COUNTER):
            yield f"track {event.track_uuid}: events and counter values do not share a track"
        yield from self._of_type(event, track)
        self._pass_flows(at_ns, event)

    def _of_type(self, event: Any, track: _TrackState) -> Iterator[str]:
        if event.type == event.TYPE_SLICE_BEGIN:
            track.open.append(event.name)
        elif event.type == event.TYPE_SLICE_END:
            if track.open:
                track.open.pop()
            else:
                yield f"track {event.track_uuid}: an end without a begin"
        elif event.type == event.TYPE_COUNTER:
            if not (event.HasField("counter_value") or event.HasField("double_counter_value")):
                yield "a counter without value"
        elif event.type != event.TYPE_INSTANT:
            yield f"type {event.type}"
        if event.type in {event.TYPE_SLICE_BEGIN, event.TYPE_INSTANT} and not event.name:
            yield "an event without name"

    def _pass_flows(self, at_ns: int, event: Any) -> None:
        for number in (*event.flow_ids, *event.terminating_flow_ids):
            flow = self._flows.setdefault(number, _Flow())
            flow.events += 1
            flow.first_ns, flow.last_ns = min(flow.first_ns, at_ns), max(flow.last_ns, at_ns)
        for number in event.terminating_flow_ids:
            self._flows[number].ends.append(at_ns)


def _is_set(message: Any, name: str) -> bool:
    value = getattr(message, name)
    return len(value) > 0 if hasattr(value, "__len__") else message.HasField(name)


def _unknown(message: Any) -> Iterator[int]:
    """Numbers of fields that this version of the format does not know, of a message and all within."""
    unknown_fields = importlib.import_module("google.protobuf.unknown_fields").UnknownFieldSet
    yield from (unknown.field_number for unknown in unknown_fields(message))
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for inner in value if hasattr(value, "__len__") else (value,):
                yield from _unknown(inner)
