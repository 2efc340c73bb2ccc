"""What a bench ran on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rollplex.bench.machine import Machine, OtherPrograms, read_machine, read_software
from rollplex.errors import ConfigError
from support.fake_nvml import FakeNvml


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository with a package in it; returns the package."""
    package = tmp_path / "repository/package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("one = 1\n")
    _git(package.parent, "init", "--quiet")
    _git(package, "add", ".")
    _git(package, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "--quiet", "-m", "first")
    return package


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, timeout=20)
    return done.stdout.decode().strip()


def test_this_machine_has_a_processor_memory_and_a_system() -> None:
    machine = read_machine()
    assert machine.cpu
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.memory_bytes > 2**28
    assert "Linux" in machine.system


def test_a_machine_is_named_in_a_few_words(machine: Machine) -> None:
    assert machine.text == "AMD EPYC, 2 cores, 24 GiB"


def test_a_gpu_that_is_used_is_named_with_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(total=141 * 2**30)
    monkeypatch.setattr("rollplex.nvml.library", lambda: fake)
    machine = read_machine(0)
    assert (machine.gpu, machine.gpu_bytes, machine.driver) == ("NVIDIA H200", 141 * 2**30, "580.159")
    assert machine.text.startswith("NVIDIA H200, 141 GiB, driver 580.159, on ")
    assert read_machine(0, 2).text.startswith("2 x NVIDIA H200, 141 GiB, driver 580.159, on ")
    assert fake.open == 0
    with pytest.raises(ConfigError, match="no such GPU"):
        read_machine(1)


def test_a_clean_checkout_has_a_commit_and_no_changes(checkout: Path) -> None:
    software = read_software(checkout)
    assert software.commit == _git(checkout, "rev-parse", "HEAD")
    assert software.changes == ""
    assert software.packages["torch"]
    assert f"commit {software.commit[:10]}" in software.text
    assert "with changes" not in software.text


def test_each_change_to_a_checkout_has_its_own_digest(checkout: Path) -> None:
    seen = [read_software(checkout).changes]
    for name, text in (("__init__.py", "one = 2\n"), ("__init__.py", "one = 3\n"), ("new.py", "")):
        (checkout / name).write_text(text)
        seen.append(read_software(checkout).changes)
    assert len(set(seen)) == 4
    assert "with changes" in read_software(checkout).text


def test_files_that_a_bench_leaves_in_a_checkout_are_no_changes(checkout: Path) -> None:
    (checkout.parent / "rows.jsonl").write_text("{}\n")
    assert read_software(checkout).changes == ""


def test_a_package_that_git_does_not_keep_has_no_commit_even_inside_a_checkout(checkout: Path) -> None:
    installed = checkout.parent / "venv/package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    software = read_software(installed)
    assert (software.commit, software.changes) == ("", "")
    assert "commit" not in software.text


def test_what_this_process_and_its_children_do_is_not_counted_as_other_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(((10.0, 100.0, 50.0), (20.0, 118.0, 63.0)))  # wall, busy, own
    now = {"at": next(clock)}
    monkeypatch.setattr("rollplex.bench.machine.time.monotonic", lambda: now["at"][0])
    monkeypatch.setattr("rollplex.bench.machine._busy_s", lambda: now["at"][1])
    monkeypatch.setattr("rollplex.bench.machine._own_s", lambda: now["at"][2])
    with OtherPrograms() as others:
        now["at"] = next(clock)
    assert others.cpus == pytest.approx(0.5)
