"""Copies after an update: who copies what, which collectives bring the same, and both through real processes."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from rollplex.bench import refresh
from rollplex.bench.machine import read_machine, read_software
from rollplex.bench.placement import parse_placements
from rollplex.bench.refresh import Wanted, measure_refresh
from rollplex.bench.refresh_plan import Collective, DeviceCopies, collectives, device_copies, rows
from rollplex.bench.refresh_report import PlacementFound, Refreshed, Seconds, notes, table_of
from rollplex.cli.app import run
from rollplex.errors import ConfigError, RollplexError, WaitError
from rollplex.layout.parameters import parameter_table
from rollplex.layout.published import QWEN2_5_VL

THREE_B = QWEN2_5_VL["3B"]
TABLE = parameter_table(THREE_B, dtype="bfloat16", freeze_vision=False)


def copies_of(text: str) -> tuple[DeviceCopies, ...]:
    return device_copies(parse_placements(text)[0], TABLE, THREE_B)


def gather(*members: int) -> Collective:
    return Collective(kind="all-gather", members=members, sources=members)


def broadcast(source: int, *members: int) -> Collective:
    return Collective(kind="broadcast", members=members, sources=(source,))


@pytest.mark.parametrize(
    ("placement", "found"),
    [
        ("2x1/1x2", (gather(0, 1),)),
        ("2x1/2x1", ()),
        ("1x2/1x2", ()),
        ("1x1+1x1", (broadcast(0, 0, 1),)),
        ("4x1/2x2", (gather(0, 1), gather(2, 3))),
        ("2x2/1x4", (gather(0, 1), gather(2, 3))),
        ("2x1+1x2", (broadcast(0, 0, 2, 3), broadcast(1, 1, 2, 3))),
    ],
)
def test_pieces_are_gathered_where_everybody_gives_and_broadcast_where_one_does(
    placement: str, found: tuple[Collective, ...]
) -> None:
    assert collectives(copies_of(placement)) == found


def test_the_3b_shape_on_two_devices_moves_half_of_what_is_split_or_all() -> None:
    split, apart = copies_of("2x1/1x2"), copies_of("1x1+1x1")
    assert [each.copied_bytes for each in split] == [each.remote_bytes for each in split] == [3_753_292_800] * 2
    assert [each.copied_bytes for each in apart] == [0, 7_510_229_504]
    assert [(each.writer, each.trains) for each in apart] == [(0, True), (0, False)]
    assert {device: row.size_bytes for device, row in rows(split).items()} == {0: 3_753_292_800, 1: 3_753_292_800}


def test_a_device_of_the_second_group_reads_within_its_group_and_targets_take_turns_among_ranks() -> None:
    groups, targets = copies_of("2x2/1x4"), copies_of("2x1+1x2")
    assert [each.sources for each in groups] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [(each.writer, each.sources) for each in targets[2:]] == [(0, (0, 1)), (1, (0, 1))]


def test_every_piece_has_a_place_of_its_own_in_its_row() -> None:
    copies = copies_of("2x1/1x2")
    row = rows(copies)[1]
    transfers = copies[0].remote
    ends = [row.offset(each) + each.size_bytes for each in transfers]
    assert [row.offset(each) for each in transfers] == [0, *ends[:-1]]
    assert ends[-1] == row.size_bytes


def test_copies_and_collectives_of_real_processes_leave_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--preset", "tiny-wide", "--placements", "2x1/1x2,2x1/2x1,1x1+1x1", "--repeats", "2", "--warmup", "1"]
    assert run(["bench", "refresh", *words, "--out", str(out), "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "| 2x1/2x1 | 0 | - |" in printed
    assert "collectives: gloo" in printed
    found = json.loads((out / "refresh.json").read_text())
    assert (found["preset"], found["repeats"], found["gpus"]) == ("tiny-wide", 2, [])
    gathered, none, sent = (found["placements"][name] for name in ("2x1/1x2", "2x1/2x1", "1x1+1x1"))
    assert (gathered["kinds"], none["kinds"], sent["kinds"]) == (["all-gather"], [], ["broadcast"])
    assert none["copies"] is None
    for one in (gathered, sent):
        assert one["same"]
        ways = ("copies", "one_piece", "collective", "packed", "digest")
        assert all(one[way]["low"] <= one[way]["median"] <= one[way]["high"] for way in ways)


def wanted(tmp_path: Path, placements: str, **changes: object) -> Wanted:
    given: dict[str, object] = {"preset": "tiny-wide", "repeats": 1, "warmup": 1, "device": "host"}
    return Wanted(placements=parse_placements(placements), out=tmp_path / "out", **given | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("placements", ["1x1/1x1", "2x1/1x2,4x1/2x2"])
def test_one_device_or_different_numbers_of_them_are_refused(tmp_path: Path, placements: str) -> None:
    with pytest.raises(ConfigError, match="two or more"):
        measure_refresh(wanted(tmp_path, placements), say=print)


def test_a_process_that_ends_is_told_with_what_it_said_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "MODULE", "rollplex_trainer.no_such_module")
    with pytest.raises(RollplexError, match="A process of the bench ended.*No module named"):
        measure_refresh(wanted(tmp_path, "2x1/1x2"), say=print)


def process(sock: socket.socket, log: Path) -> Any:
    """What is used of one while it is waited for."""
    nothing: Any = None
    return refresh._Process(sock=sock, process=nothing, log=log, memory=nothing, meet=log)


def test_of_processes_that_wait_for_each_other_the_one_that_ended_is_named(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    ours, theirs = zip(*(socket.socketpair() for _ in logs), strict=True)
    logs[1].write_text("the reason\n")
    processes = [process(sock, log) for sock, log in zip(ours, logs, strict=True)]
    theirs[1].close()
    with pytest.raises(RollplexError, match=r"1\.log: A process of the bench ended; got the reason"):
        refresh._answers(processes)
    for sock in (*ours, theirs[0]):
        sock.close()


def test_processes_that_say_nothing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "TASK_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(WaitError, match="device 0: Processes of the bench say nothing"):
        refresh._answers([process(ours, tmp_path)])


def seconds(median: float) -> Seconds:
    return Seconds(median=median, low=median / 2, high=median * 2)


def test_the_table_says_rates_of_the_device_that_gets_most_and_whether_bytes_are_the_same() -> None:
    one = PlacementFound(
        copied_bytes=(0, 4_000_000_000),
        remote_bytes=(0, 2_000_000_000),
        pieces=7,
        copies=seconds(0.01),
        one_piece=seconds(0.005),
        collective=seconds(0.02),
        packed=seconds(0.04),
        digest=seconds(0.1),
        kinds=("broadcast",),
        collective_bytes=2_000_000_000,
        backend="nccl",
        same=False,
    )
    found = Refreshed(
        machine=read_machine(),
        software=read_software(),
        gpus=("NVIDIA H200 GPU-1", "NVIDIA H200 GPU-2"),
        preset="qwen2.5-vl-3b",
        dtype="bfloat16",
        repeats=20,
        warmup=3,
        command="",
        placements={"1x1+1x1": one},
    )
    assert table_of(found).rows == (
        (
            *("1x1+1x1", "4", "7", "10.00", "5.00 to 20.00", "200", "400", "broadcast", "20.00", "10.00 to 40.00"),
            *("100", "40.00", "50", "100.00", "NO"),
        ),
    )
    assert not found.same
    assert any("NVIDIA H200 GPU-1, NVIDIA H200 GPU-2" in line for line in notes(found))
