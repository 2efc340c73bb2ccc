"""How much memory the host can still give."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.errors import SegmentError
from rollplex.memory.available import Headroom, available_bytes

GIB = 2**30


def put(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="ascii")


def machine(root: Path, available: int, cgroup: str) -> None:
    put(root, "proc/meminfo", f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:   {available // 1024} kB\n")
    put(root, "proc/self/cgroup", cgroup)


def version_2(root: Path, folder: str, limit: int | str, usage: int, cache: int) -> None:
    put(root, f"{folder}/memory.max", f"{limit}\n")
    put(root, f"{folder}/memory.current", f"{usage}\n")
    put(root, f"{folder}/memory.stat", f"anon 1\nactive_file {cache // 2}\ninactive_file {cache // 2}\n")


def version_1(root: Path, folder: str, limit: int, usage: int, cache: int) -> None:
    put(root, f"{folder}/memory.limit_in_bytes", f"{limit}\n")
    put(root, f"{folder}/memory.usage_in_bytes", f"{usage}\n")
    put(root, f"{folder}/memory.stat", f"inactive_file 7\ntotal_active_file {cache}\ntotal_inactive_file 0\n")


def test_without_a_cgroup_limit_the_machine_decides(tmp_path: Path) -> None:
    machine(tmp_path, 5 * GIB, "0::/\n")
    assert available_bytes(tmp_path) == 5 * GIB


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/a/b", "sys/fs/cgroup/a", "sys/fs/cgroup"])
def test_every_limit_above_the_process_counts_in_version_2(tmp_path: Path, folder: str) -> None:
    machine(tmp_path, 5 * GIB, "0::/a/b\n")
    version_2(tmp_path, "sys/fs/cgroup/a/b", "max", GIB, 0)
    version_2(tmp_path, folder, 4 * GIB, 3 * GIB, GIB)
    assert available_bytes(tmp_path) == 2 * GIB


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/memory/a/b", "sys/fs/cgroup/memory"])
def test_version_1_counts_too_and_its_unlimited_does_not(tmp_path: Path, folder: str) -> None:
    machine(tmp_path, 5 * GIB, "8:pids:/c\n4:memory:/a/b\n0::/\n")
    version_1(tmp_path, "sys/fs/cgroup/memory/a/b", 2**63 - 4096, GIB, 0)
    version_1(tmp_path, folder, 4 * GIB, 3 * GIB, GIB)
    version_1(tmp_path, "sys/fs/cgroup/memory/c", GIB, GIB, 0)
    assert available_bytes(tmp_path) == 2 * GIB


def test_over_the_limit_means_none(tmp_path: Path) -> None:
    machine(tmp_path, 5 * GIB, "0::/\n")
    version_2(tmp_path, "sys/fs/cgroup", GIB, 2 * GIB, 0)
    assert available_bytes(tmp_path) == 0


def test_a_machine_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="meminfo"):
        available_bytes(tmp_path)
    put(tmp_path, "proc/meminfo", "MemTotal: 99 kB\n")
    with pytest.raises(SegmentError, match="MemAvailable"):
        available_bytes(tmp_path)


def test_this_machine_has_some_memory_left() -> None:
    assert available_bytes() > 2**20


def test_small_requests_ask_the_machine_once_a_second_and_count_down_meanwhile() -> None:
    asked, now, free = [], [100.0], [1600]

    def read() -> int:
        asked.append(now[0])
        return free[0]

    headroom = Headroom(read, lambda: now[0])
    assert [headroom.left(100), headroom.left(90), headroom.left(80)] == [1600, 1500, 1410]
    assert asked == [100.0]
    free[0] = 1000
    assert headroom.left(84) == 1000, "more than a sixteenth of the 1330 that are left"
    now[0] = 101.5
    free[0] = 5000
    assert headroom.left(1) == 5000
    assert asked == [100.0, 100.0, 101.5]


def test_where_little_is_left_every_request_asks() -> None:
    answers = [50, 40, 7]
    headroom = Headroom(lambda: answers.pop(0), lambda: 0.0)
    assert [headroom.left(10), headroom.left(10), headroom.left(10)] == [50, 40, 7]
