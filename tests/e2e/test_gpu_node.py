"""A node that is to run on a GPU, on a machine that has one in name only: what is checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.cli.app import run
from support import fake_mps
from support.nodes import Project, Start

TESTS = Path(__file__).parents[1]
NVML = """
from support.fake_nvml import FakeNvml, NvmlError
_fake = FakeNvml(total={total}, used=0, count={count})
globals().update({{name: getattr(_fake, name) for name in dir(_fake) if name.lower().startswith("nvml")}})
NVMLError = NvmlError
"""
MIB = 2**20


def with_gpu(folder: Path, total_bytes: int, count: int = 1) -> dict[str, str]:
    """Variables for a process that finds so many GPUs of this size."""
    (folder / "pynvml.py").write_text(NVML.format(total=total_bytes, count=count))
    return {"PYTHONPATH": f"{folder}:{TESTS}"}


@pytest.mark.parametrize(("total", "code"), [(2**30, 0), (20 * MIB, 2)])
def test_a_dry_run_plans_for_the_memory_that_the_gpu_has_free(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    total: int,
    code: int,
) -> None:
    monkeypatch.setenv("ROLLPLEX_RUNS_DIR", str(tmp_path / "runs"))
    for name, value in with_gpu(tmp_path, total).items():
        monkeypatch.setenv(name, value)
    overrides = ["--set", "device.kind=cuda", "--set", "memory.overhead=1MiB"]
    assert run(["up", str(project.config), "--dry-run", *overrides]) == code
    out, err = capfd.readouterr()
    if code == 0:
        assert "GPU 0 (NVIDIA H200, driver 580.159), 1,024.0 MiB free; workers share it by mps" in out
        assert "leases may take 1,023.0 MiB" in out
        assert "host memory" in out
    else:
        assert "Use a GPU with more memory (this one has 20 MiB free)" in err
        assert "actor_weights" in err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_for_several_gpus_shows_each_and_its_share(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLPLEX_RUNS_DIR", str(tmp_path / "runs"))
    for name, value in with_gpu(tmp_path, 2**30, count=3).items():
        monkeypatch.setenv(name, value)
    overrides = [
        f"--set={key}" for key in ("device.kind=cuda", "device.gpu=1", "memory.overhead=2MiB", "parallel.devices=2")
    ]
    assert run(["up", str(project.config), "--dry-run", *overrides]) == 0
    out, _ = capfd.readouterr()
    for text in ("0:0: GPU 1 (NVIDIA H200", "0:1: GPU 2 (NVIDIA H200"):
        assert text in out
    assert "leases may take 2,046.0 MiB (2048 MiB, less 2 MiB of memory.overhead (the processes themselves)): in" in out
    assert out.count("leases may take 1,023.0 MiB") == 2
    assert run(["up", str(project.config), "--dry-run", *overrides, "--set=parallel.devices=3"]) == 2
    assert "parallel.devices: 3 with device.gpu: 1 on a machine with 3" in capfd.readouterr().err


def test_a_gpu_that_is_not_there_is_refused_before_there_is_a_journal(start: Start, tmp_path: Path) -> None:
    ended = start(overrides={"device.kind": "cuda"}, env=with_gpu(tmp_path, 2**30, count=0)).wait()
    assert ended.code == 2
    assert "There is no such GPU; got GPU 0 of 0; needed at least one GPU" in ended.stderr
    assert not (ended.run_dir / "journal.sqlite").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_daemons_that_were_started_are_stopped_when_a_gpu_s_memory_cannot_be_reached(
    start: Start, tmp_path: Path, count: int
) -> None:
    env = {**with_gpu(tmp_path, 2**30, count), **fake_mps.install(tmp_path), "TMPDIR": str(tmp_path)}
    ended = start(overrides={"device.kind": "cuda", "parallel.devices": count}, env=env).wait()
    assert ended.code == 1
    assert "error: SegmentError in phase LOAD" in ended.stderr
    started = [call for uuid in ("GPU-1234", "GPU-1234-1")[:count] for call in (f"-d {uuid}", "get_server_list")]
    assert fake_mps.calls(tmp_path) == [*started, *["quit -t 1"] * count]
    assert not list(tmp_path.glob("rollplex-mps-*"))
    assert not [link for link in ended.run_dir.glob("mps*") if link.is_symlink()]
