"""Each rule of Perfetto's, broken once in an otherwise good trace, is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2

from rollplex.trace.validate import problems

pb: Any = perfetto_trace_pb2
Break = Callable[[Any], object]


def events(trace: Any, kind: str) -> list[Any]:
    wanted = getattr(pb.TrackEvent, kind)
    return [packet for packet in trace.packet if packet.HasField("track_event") and packet.track_event.type == wanted]


def track(trace: Any, name: str) -> Any:
    return next(packet.track_descriptor for packet in trace.packet if packet.track_descriptor.name == name)


def swap_times(trace: Any) -> None:
    first, second = [p for p in events(trace, "TYPE_SLICE_BEGIN") if p.track_event.name in {"SCORE", "TRAIN"}][:2]
    first.timestamp, second.timestamp = second.timestamp, first.timestamp


def with_flow(trace: Any) -> Any:
    return next(p.track_event for p in events(trace, "TYPE_SLICE_BEGIN") if p.track_event.terminating_flow_ids)


def end_too_early(trace: Any) -> None:
    """A flow that goes on after its end."""
    chain = [p for p in events(trace, "TYPE_SLICE_BEGIN") if 1 in p.track_event.flow_ids]
    chain[0].track_event.terminating_flow_ids.append(1)
    begins = [p for p in events(trace, "TYPE_SLICE_BEGIN") if p not in chain]
    last = next(p for p in begins if 1 in p.track_event.terminating_flow_ids)
    last.track_event.ClearField("terminating_flow_ids")
    last.track_event.flow_ids.append(1)


BROKEN: dict[str, tuple[Break, str]] = {
    "no snapshot": (lambda t: t.packet[0].ClearField("clock_snapshot"), "clock 3 is in no snapshot"),
    "snapshot without the trace's clock": (
        lambda t: setattr(t.packet[0].clock_snapshot, "primary_trace_clock", pb.BUILTIN_CLOCK_BOOTTIME),
        "does not have the trace's clock 6",
    ),
    "another clock": (
        lambda t: setattr(events(t, "TYPE_INSTANT")[0], "timestamp_clock_id", 6),
        "clock 6 is in no snapshot",
    ),
    "no clock": (
        lambda t: events(t, "TYPE_SLICE_END")[0].ClearField("timestamp_clock_id"),
        "clock 0 is in no snapshot",
    ),
    "no time": (lambda t: events(t, "TYPE_INSTANT")[0].ClearField("timestamp"), "without timestamp"),
    "no sequence": (lambda t: t.packet[5].ClearField("trusted_packet_sequence_id"), "no trusted_packet_sequence_id"),
    "a track that is not described": (
        lambda t: setattr(events(t, "TYPE_INSTANT")[0].track_event, "track_uuid", 77),
        "track 77 is not described",
    ),
    "a parent that is not described": (lambda t: setattr(track(t, "phases"), "parent_uuid", 77), "its parent 77"),
    "a track described twice": (
        lambda t: setattr(track(t, "phases"), "uuid", track(t, "iterations").uuid),
        "described twice",
    ),
    "a track without name": (lambda t: track(t, "phases").ClearField("name"), "has no name"),
    "time goes back": (swap_times, "goes back from"),
    "an end too many": (lambda t: t.packet.append(events(t, "TYPE_SLICE_END")[-1]), "an end without a begin"),
    "a begin too many": (lambda t: t.packet.append(events(t, "TYPE_SLICE_BEGIN")[-1]), "never ended"),
    "a slice on a counter": (
        lambda t: setattr(events(t, "TYPE_INSTANT")[-1].track_event, "track_uuid", track(t, "rollout kv").uuid),
        "do not share a track",
    ),
    "a counter on a slice track": (
        lambda t: setattr(events(t, "TYPE_COUNTER")[0].track_event, "track_uuid", track(t, "start").uuid),
        "do not share a track",
    ),
    "a counter without value": (
        lambda t: events(t, "TYPE_COUNTER")[0].track_event.ClearField("counter_value"),
        "a counter without value",
    ),
    "an event without name": (
        lambda t: events(t, "TYPE_SLICE_BEGIN")[0].track_event.ClearField("name"),
        "an event without name",
    ),
    "an event without type": (
        lambda t: setattr(events(t, "TYPE_INSTANT")[0].track_event, "type", pb.TrackEvent.TYPE_UNSPECIFIED),
        "type 0",
    ),
    "a name that is interned nowhere": (
        lambda t: setattr(events(t, "TYPE_SLICE_BEGIN")[0].track_event, "name_iid", 3),
        "name_iid, which nothing defines",
    ),
    "interned data": (
        lambda t: t.packet[3].interned_data.event_names.add(iid=1, name="x"),
        "interned data or sequence flags",
    ),
    "an unknown field": (
        lambda t: t.packet[6].track_event.MergeFromString(b"\xf8\xff\x01\x01"),
        "unknown field 4095",
    ),
    "a flow with one end": (lambda t: with_flow(t).flow_ids.append(999), "flow 999 has one end only"),
    "a flow without end": (lambda t: with_flow(t).ClearField("terminating_flow_ids"), "ends 0 times"),
    "a flow that goes on after its end": (end_too_early, "flow 1 ends at"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(trace_file: Path, name: str) -> None:
    break_it, said = BROKEN[name]
    trace = pb.Trace.FromString(trace_file.read_bytes())
    break_it(trace)
    trace_file.write_bytes(trace.SerializeToString())
    found = problems(trace_file)
    assert any(said in problem for problem in found), found


def test_at_most_so_many_problems_are_told(trace_file: Path) -> None:
    trace = pb.Trace.FromString(trace_file.read_bytes())
    del trace.packet[0]
    trace_file.write_bytes(trace.SerializeToString())
    assert len(problems(trace_file, limit=7)) == 7
