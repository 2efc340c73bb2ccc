"""The trace file that ui.perfetto.dev opens: chapters as TrackEvents in Perfetto's own protobuf format.

Owns packets, track ids, flow ids and the clock. Written chapter by chapter: a run of any length needs the memory of
one iteration.

Clock: every timestamp is CLOCK_MONOTONIC and says so. A trace's clock is BOOTTIME unless a ClockSnapshot names another;
the first packet is one that names MONOTONIC, with the wall clock's time at the same moment, so that nothing is
converted and the viewer can show dates.

Flows: an id goes from event to event in the order of time, through events that have it in `flow_ids` to the one that
has it in `terminating_flow_ids`; it cannot fork, so that each arrow that forks gets an id of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any, TypeAlias

from msgspec import Struct

from rollplex.trace.lanes import Edge, Lane, Turn, arrange
from rollplex.trace.marks import Chapter, Mark, Sample, Value
from rollplex.trace.tracks import ALL_KINDS, Label, kind_label, label, memory_label

SEQUENCE = 1
"""All packets are of one writer."""
_UUIDS = 0x526F6C70 << 32
"""Track ids count up from here ("Rolp"), so that they meet no others in a merged trace."""

_Event: TypeAlias = tuple[int, Turn | Sample, int]
"""Time, what happens, id of the track."""


class Written(Struct, kw_only=True):
    """What a file has in it."""

    iterations: int = 0
    slices: int = 0
    moments: int = 0
    arrows: int = 0
    size_bytes: int = 0


class TraceWriter:
    """Writes one trace.

    Args:
        file: open for writing bytes.
        name: what the group of all tracks is called.
        wall_s: seconds since 1970 at the moment `monotonic_s`.
    """

    def __init__(self, file: IO[bytes], name: str, *, wall_s: float, monotonic_s: float) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2  # noqa: PLC0415 - only this command needs it

        self._pb: Any = perfetto_trace_pb2
        self._packet = self._pb.TracePacket()
        """The next one; a new one each time, for a message that is emptied keeps the memory of all it ever held."""
        self._file = file
        self._uuids = 0
        self._flows = 0
        self._lanes: dict[str, tuple[list[Lane], list[int]]] = {}
        self._counters: dict[tuple[str, str], int] = {}
        self._groups: dict[str, int] = {}
        self._leased: dict[str, dict[str, int]] = {}
        self.written = Written()
        self._clock(wall_s, monotonic_s)
        self._root = self._track(Label(name, 0, "One run of Rollplex."), None, group=True)

    def write(self, chapter: Chapter) -> None:
        """Append a chapter. Within each track it must not begin before what was written already ended."""
        self.written.iterations += chapter.step is not None
        begins, ends = self._flow_ids(chapter.arrows)
        for at_ns, what, track in sorted(self._events(chapter), key=lambda event: event[0]):
            if isinstance(what, Sample):
                self._sample(what, track)
            else:
                self._turn(at_ns, what, track, begins.get(id(what.mark), ()), ends.get(id(what.mark), ()))

    # --- order ----------------------------------------------------------------------------------------------------

    def _events(self, chapter: Chapter) -> Iterable[_Event]:
        by_track: dict[str, list[Mark]] = {}
        for mark in chapter.marks:
            by_track.setdefault(mark.track, []).append(mark)
        for track, marks in by_track.items():
            lanes, uuids = self._lanes.setdefault(track, ([], []))
            for index, turns in enumerate(arrange(marks, lanes)):
                if index == len(uuids):
                    uuids.append(self._track(label(track), self._root))
                for turn in turns:
                    yield turn.at_ns, turn, uuids[index]
        for sample in chapter.samples:
            for one in (sample, self._total(sample)):
                yield one.at_ns, one, self._counter(one)

    def _flow_ids(self, arrows: list[tuple[Mark, ...]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """By the identity of a mark: ids that go on from it, and ids that end there."""
        begins: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for chain in arrows:
            self._flows += 1
            for mark in chain[:-1]:
                begins.setdefault(id(mark), []).append(self._flows)
            ends.setdefault(id(chain[-1]), []).append(self._flows)
            self.written.arrows += len(chain) - 1
        return begins, ends

    def _total(self, sample: Sample) -> Sample:
        leased = self._leased.setdefault(sample.device, {})
        leased[sample.kind] = sample.size_bytes
        total = sum(leased.values())
        return Sample(device=sample.device, kind=ALL_KINDS, at_ns=sample.at_ns, size_bytes=total)

    # --- packets --------------------------------------------------------------------------------------------------

    def _clock(self, wall_s: float, monotonic_s: float) -> None:
        packet, pb = self._packet, self._pb
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.clock_snapshot.primary_trace_clock = pb.BUILTIN_CLOCK_MONOTONIC
        for clock, seconds in ((pb.BUILTIN_CLOCK_MONOTONIC, monotonic_s), (pb.BUILTIN_CLOCK_REALTIME, wall_s)):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=round(seconds * 1e9))
        self._send()

    def _track(self, shown: Label, parent: int | None, *, group: bool = False, counter: bool = False) -> int:
        self._uuids += 1
        packet, pb = self._packet, self._pb
        packet.trusted_packet_sequence_id = SEQUENCE
        track = packet.track_descriptor
        track.uuid = _UUIDS + self._uuids
        track.name = shown.name
        track.sibling_order_rank = shown.rank
        if shown.description:
            track.description = shown.description
        if parent is not None:
            track.parent_uuid = parent
        if group:
            track.child_ordering = pb.TrackDescriptor.EXPLICIT
        if counter:
            track.counter.unit = pb.CounterDescriptor.UNIT_SIZE_BYTES
        self._send()
        return _UUIDS + self._uuids

    def _counter(self, sample: Sample) -> int:
        key = (sample.device, sample.kind)
        if key not in self._counters:
            if sample.device not in self._groups:
                self._groups[sample.device] = self._track(memory_label(sample.device), self._root, group=True)
            self._counters[key] = self._track(kind_label(sample.kind), self._groups[sample.device], counter=True)
        return self._counters[key]

    def _sample(self, sample: Sample, track: int) -> None:
        event = self._event(sample.at_ns, track)
        event.type = self._pb.TrackEvent.TYPE_COUNTER
        event.counter_value = sample.size_bytes
        self._send()

    def _turn(self, at_ns: int, turn: Turn, track: int, begins: Iterable[int], ends: Iterable[int]) -> None:
        event = self._event(at_ns, track)
        if turn.edge is Edge.END:
            event.type = self._pb.TrackEvent.TYPE_SLICE_END
            self._send()
            return
        moment = turn.edge is Edge.MOMENT
        event.type = self._pb.TrackEvent.TYPE_INSTANT if moment else self._pb.TrackEvent.TYPE_SLICE_BEGIN
        event.name = turn.mark.name
        event.categories.append(turn.mark.kind)
        event.flow_ids.extend(begins)
        event.terminating_flow_ids.extend(ends)
        for name, value in turn.mark.args:
            _annotate(event.debug_annotations.add(name=name), value)
        self.written.moments += moment
        self.written.slices += not moment
        self._send()

    def _event(self, at_ns: int, track: int) -> Any:
        packet = self._packet
        packet.timestamp = at_ns
        packet.timestamp_clock_id = self._pb.BUILTIN_CLOCK_MONOTONIC
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.track_event.track_uuid = track
        return packet.track_event

    def _send(self) -> None:
        """Write the packet and begin the next. A trace is packets one after the other, each as field 1 of `Trace`."""
        body = self._packet.SerializeToString()
        self._packet = self._pb.TracePacket()
        self.written.size_bytes += self._file.write(b"\x0a" + _varint(len(body)) + body)


def _annotate(annotation: Any, value: Value) -> None:
    if isinstance(value, str):
        annotation.string_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    else:
        annotation.double_value = value


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
