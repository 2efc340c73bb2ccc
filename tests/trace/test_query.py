"""Questions to a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.trace.packets import TraceError, packets
from rollplex.trace.query import read


def test_slices_are_found_by_name_with_and_without_their_number(trace_file: Path) -> None:
    trace = read(trace_file)
    assert len(trace.named("actor prefix")) == 8
    assert len(trace.named("actor prefix 1")) == 4
    assert len(trace.named("decode")) == 4
    assert trace.named("actor") == []


def test_which_slices_lie_inside_which(trace_file: Path) -> None:
    trace = read(trace_file)
    assert len(trace.inside("actor prefix", "decode")) == 8
    assert trace.inside("reference prefix", "decode") == []  # begins during prefill
    assert len(trace.inside("reference prefix", "rollout")) == 4
    assert trace.inside("score", "rollout") == []
    assert len(trace.inside("optimizer step", "BEGIN to COMMIT")) == 4


def test_slices_of_a_track(trace_file: Path) -> None:
    assert {one.name for one in read(trace_file).on("trainer (node 0 device 0)")} == {
        "suffix 0",
        "suffix 1",
        "sum and vote 0",
        *(f"optimizer step {step}" for step in range(4)),
    }


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_a_file_that_ends_in_the_middle_of_a_packet_is_an_error(trace_file: Path, cut: int) -> None:
    whole = trace_file.read_bytes()
    ends = [0]
    trace_file.write_bytes(whole)
    for packet in packets(trace_file):
        size = packet.ByteSize()
        ends.append(ends[-1] + 1 + (1 if size < 128 else 2) + size)
    assert ends[-1] == len(whole)
    trace_file.write_bytes(whole[: ends[10] + cut])
    with pytest.raises(TraceError, match="no whole Perfetto trace"):
        read(trace_file)


@pytest.mark.parametrize("content", [b"SQLite format 3", b"\x0a" + b"\xff" * 11, b"\x0a\x01\xff", b"\x0a"])
def test_a_file_of_something_else_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="no whole Perfetto trace"):
        list(packets(path))
