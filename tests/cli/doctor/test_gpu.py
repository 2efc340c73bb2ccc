"""GPUs, by an NVML and a driver that stand in for theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollplex.cli.doctor import gpu
from rollplex.cli.doctor.finding import Finding, Verdict
from rollplex.errors import ConfigError, SegmentError
from rollplex.memory.segment import Backend, backend
from support.fake_nvml import FakeNvml

GIB = 2**30


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def on_host(uuid: str) -> Backend:
    assert uuid == "GPU-1234"
    return backend("host")


def found(root: Path, nvml: Any, segments: Any = on_host) -> dict[str, Finding]:
    return {finding.topic: finding for finding in gpu.check(root, lambda: nvml, segments)}


def test_without_a_gpu_host_memory_is_used_and_nothing_is_missing(tmp_path: Path, path: Path) -> None:
    no_driver = FakeNvml()
    no_driver.fail = {"nvmlInit"}
    for nvml in (no_driver, FakeNvml(count=0)):
        findings = found(tmp_path, nvml)
        assert list(findings) == ["gpu"]
        assert (findings["gpu"].text, findings["gpu"].verdict) == ("none: host memory is used", Verdict.OK)


def test_a_gpu_is_told_with_what_is_free_and_what_goes_with_it(tmp_path: Path, path: Path) -> None:
    program(path, "nvidia-cuda-mps-control", "exit 0")
    nvml = FakeNvml(total=140 * GIB, used=GIB)
    findings = found(tmp_path, nvml)
    assert findings["gpu 0"].text == "NVIDIA H200, 140 GiB, 139 GiB free, driver 580.159"
    assert findings["mps"].text == str(path / "nvidia-cuda-mps-control")
    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}
    assert "gpu 0 segments" in findings
    assert nvml.open == 0


def test_what_keeps_a_run_off_a_gpu_is_a_note(tmp_path: Path, path: Path) -> None:
    nvml = FakeNvml()
    nvml.mode = 3
    finding = found(tmp_path, nvml)["gpu 0"]
    assert finding.verdict is Verdict.NOTE
    assert "compute mode" in finding.text
    assert "nvidia-smi -i 0 -c DEFAULT" in finding.do


def test_who_is_on_a_gpu_is_told(tmp_path: Path, path: Path) -> None:
    nvml = FakeNvml()
    nvml.compute = [(71, GIB)]
    finding = found(tmp_path, nvml)["gpu 0"]
    assert finding.verdict is Verdict.NOTE
    assert "in use by pid 71" in finding.text


def test_without_the_daemon_s_program_that_is_a_note(tmp_path: Path, path: Path) -> None:
    finding = found(tmp_path, FakeNvml())["mps"]
    assert finding.verdict is Verdict.NOTE
    assert "take turns" in finding.do


@pytest.mark.parametrize(
    ("error", "do"),
    [
        (ImportError("No module named 'cuda'"), "rollplex[cuda]"),
        (SegmentError("no driver", do="Load it."), "Load it."),
    ],
)
def test_segments_that_cannot_be_made_are_a_problem(tmp_path: Path, path: Path, error: Exception, do: str) -> None:
    def fails(uuid: str) -> Backend:
        raise error

    finding = found(tmp_path, FakeNvml(), fails)["gpu 0 segments"]
    assert finding.verdict is Verdict.PROBLEM
    assert do in finding.do


def test_a_missing_package_matters_only_where_there_is_a_gpu(tmp_path: Path, path: Path) -> None:
    def missing() -> Any:
        raise ConfigError("A package is missing", got="No module named 'pynvml'")

    def one() -> Finding:
        (finding,) = gpu.check(tmp_path, missing, on_host)
        return finding

    assert one().text == "none: host memory is used"
    program(path, "nvidia-smi", "echo 'NVIDIA H200, 143771 MiB, 580.1'")
    assert one().verdict is Verdict.NOTE
    assert one().text == "NVIDIA H200, 143771 MiB, 580.1; but No module named 'pynvml'"
    assert "rollplex[cuda]" in one().do


def test_a_driver_without_gpu_is_a_note(tmp_path: Path, path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 580.1\nGCC\n")
    finding = found(tmp_path, FakeNvml(count=0))["gpu"]
    assert (finding.verdict, finding.text) == (Verdict.NOTE, "NVRM version: 580.1")
