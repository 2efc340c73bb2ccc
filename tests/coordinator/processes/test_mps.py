"""The MPS daemon's life, with a program in its place that can fail in every way."""

from __future__ import annotations

import os
import select
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollplex_coordinator.processes import mps as module
from rollplex_coordinator.processes.mps import Mps, MpsError, stop_leftovers
from support import fake_mps

UUID = "GPU-1234"


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of a machine with the program; whatever it started is gone afterwards."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    yield fake_mps.install(tmp_path)
    for folder in (tmp_path / "tmp").iterdir():
        module._kill_all(folder)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


def test_it_is_started_for_one_gpu_in_a_private_folder_that_the_run_directory_links_to(
    run_dir: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    mps = Mps(run_dir, UUID, variables)
    assert mps.alive
    assert stat.S_IMODE(mps.folder.stat().st_mode) == 0o700
    assert (run_dir / "mps").readlink() == mps.folder
    assert len(str(mps.folder / "control_privileged")) < 108 or str(tmp_path) in str(mps.folder)
    assert mps.variables == {
        "CUDA_MPS_PIPE_DIRECTORY": str(mps.folder),
        "CUDA_MPS_LOG_DIRECTORY": str(run_dir / "logs/mps"),
    }
    assert fake_mps.calls(tmp_path) == [f"-d {UUID}", "get_server_list"]
    mps.stop()


def test_stopping_asks_it_to_quit_and_leaves_no_process_folder_or_link(
    run_dir: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    mps = Mps(run_dir, UUID, variables)
    mps.stop()
    assert fake_mps.calls(tmp_path)[-1] == "quit -t 1"
    assert gone(mps.pid)
    assert not mps.alive
    assert not mps.folder.exists()
    assert not (run_dir / "mps").is_symlink()
    mps.stop()
    assert fake_mps.calls(tmp_path).count("quit -t 1") == 1


@pytest.mark.parametrize("how", ["stubborn", "clings"])
def test_a_daemon_that_does_not_quit_is_killed(
    run_dir: Path, variables: dict[str, str], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    mps = Mps(run_dir, UUID, {**variables, "FAKE_MPS": how})
    mps.stop(0.3)
    assert gone(mps.pid)
    assert "did not quit within 0.3 s and was killed" in caplog.text


def test_without_the_program_that_is_said(run_dir: Path) -> None:
    with pytest.raises(MpsError, match="not installed; got no nvidia-cuda-mps-control on PATH"):
        Mps(run_dir, UUID, {"PATH": str(run_dir)})
    assert not (run_dir / "mps").is_symlink()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("fail", "could not be started; got exit code 1: Cannot find"),
        ("hang", "did not start in time"),
        ("no_pid", "says no pid"),
        ("deaf", "did not answer 'get_server_list'"),
    ],
)
def test_a_daemon_that_does_not_come_up_is_an_error_and_leaves_nothing(
    run_dir: Path, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, what: str
) -> None:
    monkeypatch.setattr(module, "START_S", 0.7)
    with pytest.raises(MpsError, match=what):
        Mps(run_dir, UUID, {**variables, "FAKE_MPS": how})
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (run_dir / "mps").is_symlink()


def test_its_death_is_seen_at_once_and_named(run_dir: Path, variables: dict[str, str]) -> None:
    mps = Mps(run_dir, UUID, variables)
    os.kill(mps.pid, signal.SIGKILL)
    assert select.select([mps.pidfd], [], [], 10.0)[0]
    assert not mps.alive
    assert f"pid {mps.pid} is gone" in str(mps.died())
    mps.stop()


def test_a_client_is_terminated_through_every_server(run_dir: Path, variables: dict[str, str], tmp_path: Path) -> None:
    mps = Mps(run_dir, UUID, variables)
    mps.terminate(77)
    assert fake_mps.calls(tmp_path)[-2:] == ["get_server_list", "terminate_client 4242 77"]
    mps.stop()


def test_a_daemon_that_hangs_cannot_hold_up_whoever_asks_it(run_dir: Path, variables: dict[str, str]) -> None:
    mps = Mps(run_dir, UUID, variables)
    mps._environment["FAKE_MPS"] = "deaf"
    with pytest.raises(MpsError, match="did not answer"):
        mps.terminate(77)
    mps.stop(0.5)
    assert gone(mps.pid)


def test_what_a_crashed_coordinator_left_is_found_by_the_link_and_stopped(
    run_dir: Path, variables: dict[str, str]
) -> None:
    crashed = Mps(run_dir, UUID, variables)
    assert stop_leftovers(run_dir)
    assert gone(crashed.pid)
    assert not crashed.folder.exists()
    assert not (run_dir / "mps").is_symlink()
    assert not stop_leftovers(run_dir)


def test_a_link_to_a_daemon_that_is_gone_is_only_removed(run_dir: Path) -> None:
    (run_dir / "mps").symlink_to("/nowhere/rollplex-mps-x")
    assert not stop_leftovers(run_dir)
    assert not (run_dir / "mps").is_symlink()


def test_a_pid_that_now_belongs_to_another_program_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rollplex-mps-x"
    folder.mkdir()
    (folder / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    (run_dir / "mps").symlink_to(folder)
    assert not stop_leftovers(run_dir)
