"""The file: read back with the protobuf classes, and as Perfetto would check it."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2

from rollplex.trace.marks import Chapter, Mark, Sample
from rollplex.trace.perfetto import SEQUENCE, TraceWriter
from rollplex.trace.query import Slice, Trace, read
from rollplex.trace.run import write_trace
from rollplex.trace.tracks import label, memory_label
from rollplex.trace.validate import problems
from support.journals import WALL_S, JournalScript, run_of

pb: Any = perfetto_trace_pb2
MS = 1_000_000


def one(trace: Trace, name: str, after_s: float = 0.0) -> Slice:
    return next(found for found in trace.slices if found.name == name and found.start_ns >= after_s * 1e9)


def test_the_trace_of_a_run_has_no_problem(trace_file: Path) -> None:
    assert problems(trace_file) == []


def test_the_file_is_one_trace_message_with_a_monotonic_clock_first(trace_file: Path) -> None:
    trace = pb.Trace.FromString(trace_file.read_bytes())
    snapshot = trace.packet[0].clock_snapshot
    assert snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_MONOTONIC
    clocks = {clock.clock_id: clock.timestamp for clock in snapshot.clocks}
    assert clocks[pb.BUILTIN_CLOCK_MONOTONIC] == 10_000 * MS
    assert clocks[pb.BUILTIN_CLOCK_REALTIME] == (WALL_S + 10) * 1_000 * MS
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    assert {packet.timestamp_clock_id for packet in events} == {pb.BUILTIN_CLOCK_MONOTONIC}
    assert {packet.trusted_packet_sequence_id for packet in trace.packet} == {SEQUENCE}


def test_times_and_durations_are_the_journals_to_the_nanosecond(trace_file: Path) -> None:
    trace = read(trace_file)
    decode = one(trace, "decode", 11.2)
    assert (decode.start_ns, decode.end_ns) == (11_240 * MS, 11_300 * MS)
    unit, prefill = one(trace, "rollout 0", 11.2), one(trace, "prefill", 11.2)
    assert (unit.depth, prefill.depth, decode.depth) == (0, 1, 1)
    assert unit.track is prefill.track is decode.track
    group = one(trace, "group 1 done", 11.2)
    assert (group.moment, group.depth, group.start_ns) == (True, 2, 11_300 * MS)
    assert one(trace, "BEGIN to COMMIT").end_ns - one(trace, "BEGIN to COMMIT").start_ns == 8 * MS


def test_slices_carry_their_kind_and_their_groups(trace_file: Path) -> None:
    prefix = one(read(trace_file), "actor prefix 1")
    assert (prefix.kind, prefix.args) == ("actor_prefix", {"step": 0, "groups": "1"})


def test_arrows_lead_from_each_group_to_the_update_and_from_prefixes_to_suffixes(trace_file: Path) -> None:
    trace = read(trace_file)
    arrows = Counter((a.name, b.name) for a, b in trace.arrows() if a.start_ns < 11_200 * MS)
    assert arrows == Counter(
        {
            ("group 0 done", "reward group 0"): 1,
            ("group 1 done", "reward group 1"): 1,
            ("reward group 0", "suffix 0"): 1,
            ("reward group 1", "suffix 1"): 1,
            ("suffix 0", "prefix backward 0"): 1,
            ("suffix 1", "prefix backward 1"): 1,
            ("prefix backward 0", "update 0"): 1,
            ("prefix backward 1", "update 0"): 1,
            ("actor prefix 0", "suffix 0"): 1,
            ("actor prefix 1", "suffix 1"): 1,
            ("reference prefix 0", "score 0"): 1,
            ("reference prefix 0", "score 1"): 1,
            ("score 0", "suffix 0"): 1,
            ("score 1", "suffix 1"): 1,
            ("BEGIN to COMMIT", "optimizer step 0"): 1,
        }
    )
    assert {b.start_ns // (200 * MS) - a.start_ns // (200 * MS) for a, b in trace.arrows()} == {0}


def test_a_chain_without_its_reward_or_its_end_links_what_is_left(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.start(1.0)
        script.iteration(0, 2.0, upto=0.1045)  # group 1 is not rewarded yet
        script.iteration(1, 3.0, upto=0.135)  # one suffix unit is trained
    write_trace(tmp_path, steps=None, output=None, svg=None, say=lambda _: None)
    assert problems(tmp_path / "trace.perfetto-trace") == []
    trace = read(tmp_path / "trace.perfetto-trace")
    assert [(a.name, b.name) for a, b in trace.arrows() if a.start_ns < 3_000 * MS] == [
        ("group 0 done", "reward group 0")
    ]
    assert ("reward group 0", "suffix 0") in [(a.name, b.name) for a, b in trace.arrows()]


def test_tracks_hang_below_one_group_in_the_order_of_their_ranks(trace_file: Path) -> None:
    described = [p.track_descriptor for p in pb.Trace.FromString(trace_file.read_bytes()).packet]
    tracks = [track for track in described if track.uuid]
    (root,) = [track for track in tracks if not track.HasField("parent_uuid")]
    assert (root.name, root.child_ordering) == ("rollplex digits-1 (overlap)", pb.TrackDescriptor.EXPLICIT)
    below = sorted((t for t in tracks if t.parent_uuid == root.uuid), key=lambda track: track.sibling_order_rank)
    assert [track.name for track in below] == [
        "iterations",
        "phases",
        "rollout (node 0 device 0)",
        "prefix (node 0 device 0)",
        "trainer (node 0 device 0)",
        "rewards",
        "update",
        "events",
        "start",
        "leased on node 0 device 0",
    ]
    counters = sorted(
        (t for t in tracks if t.parent_uuid == below[-1].uuid), key=lambda track: track.sibling_order_rank
    )
    assert [track.name for track in counters] == ["all", "actor weights", "rollout kv"]
    assert all(track.counter.unit == pb.CounterDescriptor.UNIT_SIZE_BYTES for track in counters)


def test_counters_go_up_and_down_with_the_leases_and_all_is_their_sum(trace_file: Path) -> None:
    trace = read(trace_file)
    by_name = {trace.tracks[uuid].name: values for uuid, values in trace.counters.items()}
    assert by_name["rollout kv"][:2] == [(11_015 * MS, 1_000), (11_101 * MS, 0)]
    assert by_name["all"][:3] == [(10_600 * MS, 5_000), (11_015 * MS, 6_000), (11_101 * MS, 5_000)]


def test_services_of_two_devices_have_tracks_of_their_own_below_each_other() -> None:
    tracks = ["trainer[0:1]", "prefix[0:0]", "rollout[0:1]", "rollout[0:0]", "rollout[1:0]", "mine"]
    shown = sorted(map(label, tracks), key=lambda one: one.rank)
    assert [one.name for one in shown] == [
        "rollout (node 0 device 0)",
        "prefix (node 0 device 0)",
        "rollout (node 0 device 1)",
        "trainer (node 0 device 1)",
        "rollout (node 1 device 0)",
        "mine",
    ]
    assert memory_label("1:2").name == "leased on node 1 device 2"


def test_overlapping_rewards_are_drawn_on_two_tracks_of_one_name(tmp_path: Path) -> None:
    chapter = Chapter(
        marks=[
            Mark(track="rewards", name=f"reward group {n}", kind="reward", start_ns=10 * n, end_ns=10 * n + 15)
            for n in range(3)
        ],
        samples=[Sample(device="0:0", kind="inputs", at_ns=12, size_bytes=3)],
    )
    path = tmp_path / "t"
    with path.open("wb") as file:
        writer = TraceWriter(file, "r", wall_s=1.0, monotonic_s=0.0)
        writer.write(chapter)
    assert problems(path) == []
    assert writer.written.slices == 3
    assert writer.written.size_bytes == path.stat().st_size
    assert Counter(one.track.uuid for one in read(path).on("rewards")).most_common()[0][1] == 2


def test_the_events_of_an_iteration_are_in_the_order_of_time(tmp_path: Path) -> None:
    run_of(tmp_path, 1)
    write_trace(tmp_path, steps=None, output=None, svg=None, say=lambda _: None)
    trace = pb.Trace.FromString((tmp_path / "trace.perfetto-trace").read_bytes())
    times = [packet.timestamp for packet in trace.packet if packet.HasField("track_event")]
    assert len(times) > 50
    assert times == sorted(times)


def test_the_same_journal_gives_the_same_bytes(tmp_path: Path) -> None:
    run_of(tmp_path, 2)
    files = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        write_trace(tmp_path, steps=None, output=path, svg=None, say=lambda _: None)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_long_body_is_framed_as_protobuf_frames_it() -> None:
    file = io.BytesIO()
    name = "x" * 70_000
    TraceWriter(file, name, wall_s=1.0, monotonic_s=0.0)
    trace = pb.Trace.FromString(file.getvalue())
    assert trace.packet[1].track_descriptor.name == name
