"""Cores, memory and limits, on machines that are made up of a few files."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.cli.doctor import system
from rollplex.cli.doctor.finding import Finding, Verdict
from rollplex.errors import SegmentError

GIB = 2**30


def found(root: Path, topic: str) -> Finding:
    return next(finding for finding in system.check({}, root) if finding.topic == topic)


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """A root with /proc and /sys of a machine with so much memory and, if given, a quota of cores."""

    def make(total: int = 64 * GIB, available: int = 60 * GIB, **files: str) -> Path:
        given = {
            "proc/meminfo": f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n",
            "proc/self/cgroup": "0::/job\n",
            **{name.replace("__", "/"): text for name, text in files.items()},
        }
        for name, text in given.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_memory_tells_the_default_budget(machine: Callable[..., Path]) -> None:
    memory = found(machine(), "memory")
    assert memory.verdict is Verdict.OK
    assert memory.text.startswith(
        "64 GiB (machine or control group), 60 GiB available now; default budget 32 GiB, less"
    )


def test_memory_in_use_is_a_note_and_too_little_a_problem(machine: Callable[..., Path]) -> None:
    assert found(machine(available=20 * GIB), "memory").verdict is Verdict.NOTE
    memory = found(machine(total=2 * GIB, available=2 * GIB), "memory")
    assert memory.verdict is Verdict.PROBLEM
    assert "memory.budget" in memory.do


def test_memory_that_cannot_be_known_is_a_problem(tmp_path: Path) -> None:
    assert found(tmp_path, "memory").verdict is Verdict.PROBLEM


def test_the_smallest_quota_of_cores_above_us_counts(machine: Callable[..., Path]) -> None:
    root = machine()
    assert system.cpu_quota(root) is None
    write(root, "sys/fs/cgroup/job/cpu.max", "max 100000")
    assert system.cpu_quota(root) is None
    write(root, "sys/fs/cgroup/cpu.max", "50000 100000")
    assert system.cpu_quota(root) == 0.5
    cores = found(root, "cores")
    assert (cores.verdict, "a control group's quota of 0.5" in cores.text) == (Verdict.NOTE, True)


def test_a_quota_of_the_older_kind_counts_too(machine: Callable[..., Path]) -> None:
    root = machine()
    write(root, "proc/self/cgroup", "3:cpu,cpuacct:/job\n0::/\n")
    write(root, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1")
    write(root, "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    assert system.cpu_quota(root) is None
    write(root, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "150000")
    assert system.cpu_quota(root) == 1.5


@pytest.mark.parametrize(("soft", "verdict"), [(100, "PROBLEM"), (512, "note"), (4096, "ok"), (-1, "ok")])
def test_few_open_files_are_told(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, soft: int, verdict: str
) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (soft, -1) if kind == resource.RLIMIT_NOFILE else real(kind)
    )
    assert found(machine(), "open files").verdict == verdict


def test_a_bounded_address_space_is_a_problem(machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (GIB, GIB) if kind == resource.RLIMIT_AS else real(kind))
    assert found(machine(), "address space").verdict is Verdict.PROBLEM


def test_what_the_kernel_does_not_do_is_a_problem(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine()
    assert {found(root, topic).verdict for topic in ("segments", "descriptors", "handles")} == {Verdict.OK}

    def refuse(*_: object) -> int:
        raise PermissionError(1, "not here")

    def refuse_to_send(*_: object) -> None:
        raise SegmentError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr("rollplex.memory.fds.send", refuse_to_send)
    for topic in ("segments", "descriptors", "handles"):
        finding = found(root, topic)
        assert (finding.verdict, "not here" in finding.text, bool(finding.do)) == (Verdict.PROBLEM, True, True)


def test_the_distribution_is_told_where_it_is_known(machine: Callable[..., Path]) -> None:
    root = machine()
    assert found(root, "system").text.startswith("distribution unknown, Linux ")
    write(root, "etc/os-release", 'NAME=x\nPRETTY_NAME="Debian 12"\n')
    assert found(root, "system").text.startswith("Debian 12, Linux ")


def test_an_old_python_is_a_problem(machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(machine(), "python").verdict is Verdict.OK
    monkeypatch.setattr(system, "MIN_PYTHON", (9, 9))
    assert found(machine(), "python").verdict is Verdict.PROBLEM
