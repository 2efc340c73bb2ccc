"""GPUs and Docker, by programs that stand in for theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.cli.doctor import outside
from rollplex.cli.doctor.finding import Finding, Verdict


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make programs by name from lines of shell; nothing else is on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def make(**scripts: str) -> None:
        for name, text in scripts.items():
            file = tmp_path / "bin" / name.replace("_", "-")
            file.write_text(f"#!/bin/sh\n{text}\n")
            file.chmod(0o755)

    return make


def found(root: Path) -> dict[str, Finding]:
    return {finding.topic: finding for finding in outside.check(root)}


def test_where_there_is_nothing_it_says_so_and_nothing_is_wrong(programs: Callable[..., None], tmp_path: Path) -> None:
    findings = found(tmp_path)
    assert findings["gpu"].text == "none: host memory only"
    assert "not installed" in findings["docker"].text
    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}


def test_gpus_are_listed(programs: Callable[..., None], tmp_path: Path) -> None:
    programs(nvidia_smi="echo 'NVIDIA H200, 143771 MiB, 580.1'; echo 'NVIDIA H200, 143771 MiB, 580.1'")
    assert found(tmp_path)["gpu"].text == "NVIDIA H200, 143771 MiB, 580.1; NVIDIA H200, 143771 MiB, 580.1"


def test_a_driver_without_gpu_is_a_note(programs: Callable[..., None], tmp_path: Path) -> None:
    programs(nvidia_smi="exit 9")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 580.1\nGCC\n")
    gpu = found(tmp_path)["gpu"]
    assert (gpu.verdict, gpu.text) == (Verdict.NOTE, "NVRM version: 580.1")


def test_a_program_that_hangs_is_given_up(
    programs: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "ASK_S", 0.1)
    programs(nvidia_smi="exec /bin/sleep 20")
    assert found(tmp_path)["gpu"].text == "none: host memory only"


def test_docker_is_told_with_compose_and_its_silence_is_a_note(programs: Callable[..., None], tmp_path: Path) -> None:
    programs(docker='[ "$1" = version ] && echo 29.1 || echo 5.0')
    assert found(tmp_path)["docker"].text == "engine 29.1, compose 5.0"
    programs(docker="exit 1")
    assert found(tmp_path)["docker"].verdict is Verdict.NOTE
