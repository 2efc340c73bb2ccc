"""The run directory, the secret, and that one coordinator owns both."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.errors import ConfigError
from rollplex.protocol import rundir
from rollplex.protocol.claim import claim, holder_of
from rollplex.protocol.common import Device, Role
from rollplex.protocol.rundir import RunDir, attach, check_path, next_incarnation, read_secret

HOLD = """
import sys, time
from pathlib import Path
from rollplex.protocol.claim import claim
held = claim(Path(sys.argv[1]), "first-run")
print("held", flush=True)
sys.stdin.read()
"""


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def leave_socket(path: Path) -> None:
    """As a process leaves it that was killed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_a_claimed_directory_is_closed_to_others_and_has_a_secret_that_workers_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        held = claim(tmp_path / "a" / "run", "r1")
    finally:
        os.umask(before)
    run_dir = attach(tmp_path / "a" / "run")
    assert [mode(path) for path in (run_dir.path, run_dir.sockets, run_dir.incarnations)] == [0o700] * 3
    assert [mode(path) for path in (run_dir.secret_file, run_dir.lock_file)] == [0o600] * 2
    assert read_secret(run_dir) == held.secret
    assert len(held.secret) == 32
    assert run_dir.control_endpoint == f"ipc://{tmp_path}/a/run/sockets/control.sock"
    held.release()


def test_each_run_has_another_secret(tmp_path: Path) -> None:
    with claim(tmp_path / "run", "r1") as first:
        pass
    with claim(tmp_path / "run", "r2") as second:
        assert first.secret != second.secret


def test_a_released_directory_has_neither_secret_nor_sockets(tmp_path: Path) -> None:
    with claim(tmp_path / "run", "r1") as held:
        for path in (held.run_dir.control_socket, held.run_dir.segments_socket):
            leave_socket(path)
    held.release()
    assert list(held.run_dir.sockets.iterdir()) == []
    with pytest.raises(ConfigError, match="Run secret cannot be read"):
        read_secret(held.run_dir)


@pytest.fixture
def hold(tmp_path: Path) -> Callable[[], subprocess.Popen[str]]:
    """Another process that claims tmp_path/run."""

    def start() -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / "run")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        return child

    return start


def test_a_second_coordinator_is_refused_and_told_of_the_first(
    tmp_path: Path, hold: Callable[[], subprocess.Popen[str]]
) -> None:
    with hold() as child:
        secret = read_secret(attach(tmp_path / "run"))
        with pytest.raises(ConfigError, match="Another coordinator holds this run directory") as caught:
            claim(tmp_path / "run", "second-run")
        assert f"pid {child.pid} on {socket.gethostname()}, run first-run" in str(caught.value)
        assert read_secret(attach(tmp_path / "run")) == secret
        child.communicate(timeout=20)


def test_what_a_killed_coordinator_left_is_cleared_and_its_lock_is_free(
    tmp_path: Path, hold: Callable[[], subprocess.Popen[str]]
) -> None:
    with hold() as child:
        run_dir = RunDir(tmp_path / "run")
        old = read_secret(run_dir)
        leave_socket(run_dir.control_socket)
        child.kill()
        child.wait(timeout=20)
    with claim(tmp_path / "run", "next-run") as held:
        assert not run_dir.control_socket.exists()
        assert read_secret(run_dir) == held.secret != old
        assert json.loads(run_dir.lock_file.read_text())["run_id"] == "next-run"


def test_a_lock_whose_holder_has_not_yet_written_who_it_is_is_still_held(
    tmp_path: Path, hold: Callable[[], subprocess.Popen[str]]
) -> None:
    with hold() as child:
        (tmp_path / "run" / "coordinator.lock").write_text('{"pid": ')
        with pytest.raises(ConfigError, match="just starting"):
            claim(tmp_path / "run", "second-run")
        child.communicate(timeout=20)


def test_the_holder_is_told_without_taking_the_lock_from_it(
    tmp_path: Path, hold: Callable[[], subprocess.Popen[str]]
) -> None:
    assert holder_of(tmp_path / "run") is None
    with hold() as child:
        holder = holder_of(tmp_path / "run")
        assert holder is not None
        assert (holder.pid, holder.host, holder.run_id) == (child.pid, socket.gethostname(), "first-run")
        with pytest.raises(ConfigError, match="Another coordinator holds"):
            claim(tmp_path / "run", "second-run")
        child.kill()
        child.wait(timeout=20)
    assert "first-run" in RunDir(tmp_path / "run").lock_file.read_text()
    assert holder_of(tmp_path / "run") is None
    claim(tmp_path / "run", "next-run").release()
    assert holder_of(tmp_path / "run") is None


def test_a_claim_waits_until_a_look_at_the_lock_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path / "run", "r1").release()
    fd = os.open(RunDir(tmp_path / "run").lock_file, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    monkeypatch.setattr("rollplex.protocol.claim.time.sleep", lambda _: os.close(fd))
    claim(tmp_path / "run", "r2").release()


def test_a_live_holder_that_does_not_say_who_it_is_is_an_error(
    tmp_path: Path, hold: Callable[[], subprocess.Popen[str]]
) -> None:
    with hold() as child:
        (tmp_path / "run" / "coordinator.lock").write_text('{"pid": ')
        with pytest.raises(ConfigError, match="does not say who it is"):
            holder_of(tmp_path / "run")
        child.communicate(timeout=20)


def test_something_else_in_a_sockets_place_is_not_removed(tmp_path: Path) -> None:
    with claim(tmp_path / "run", "r1") as held:
        path = held.run_dir.control_socket
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        claim(tmp_path / "run", "r2")
    assert path.read_text() == "precious"
    path.unlink()
    claim(tmp_path / "run", "r3").release()


def test_a_directory_that_is_open_to_others_is_refused_unless_it_is_empty(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    fresh = tmp_path / "volume"
    fresh.mkdir()
    fresh.chmod(0o777)
    claim(fresh, "r1").release()
    assert mode(fresh) == 0o700
    fresh.chmod(0o750)
    for use in (lambda: claim(fresh, "r2"), lambda: attach(fresh)):
        with pytest.raises(ConfigError, match="open to others") as caught:
            use()
        assert "mode 0750" in str(caught.value)
        assert f"chmod 700 {fresh}" in str(caught.value)


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / ("x" * (107 - len(os.fsencode(tmp_path)) - len("//sockets/segments.sock") + 1))
    longest = len(os.fsencode(RunDir(path).segments_socket))
    assert longest == 108
    with pytest.raises(ConfigError, match="too long for a unix socket") as caught:
        claim(path, "r1")
    assert "108 bytes" in str(caught.value)
    assert "1 bytes shorter" in str(caught.value)
    assert not path.exists()
    shorter = path.with_name(path.name[1:])
    with claim(shorter, "r1") as held, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(held.run_dir.segments_socket))


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_path(RunDir(tmp_path))
    monkeypatch.setattr(rundir, "file_system_of", lambda path: "nfs4")
    with pytest.raises(ConfigError, match="network file system") as caught:
        claim(tmp_path / "run", "r1")
    assert "nfs4" in str(caught.value)


def test_the_file_system_of_a_path_is_found_though_it_does_not_exist_yet() -> None:
    assert rundir.file_system_of(Path("/proc/self/nothing/here")) == "proc"


@pytest.mark.parametrize("path", ["/proc/rollplex-run", "/dev/null/run"])
def test_a_directory_that_cannot_be_made_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        claim(Path(path), "r1")


def test_a_file_in_the_directorys_place_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError):
        claim(tmp_path / "run", "r1")
    with pytest.raises(ConfigError, match="not a directory"):
        attach(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be used"):
        attach(tmp_path / "nowhere")


def spoil_mode(path: Path) -> None:
    path.chmod(0o640)


def spoil_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def spoil_short(path: Path) -> None:
    path.write_bytes(bytes(31))


def spoil_long(path: Path) -> None:
    path.write_bytes(bytes(33))


def spoil_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("spoil", [spoil_mode, spoil_link, spoil_short, spoil_long, spoil_pipe])
def test_a_secret_that_is_not_a_private_file_of_32_bytes_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    with claim(tmp_path / "run", "r1") as held:
        spoil(held.run_dir.secret_file)
        with pytest.raises(ConfigError, match="Run secret"):
            read_secret(held.run_dir)


def test_incarnations_count_from_one_per_place_across_processes(tmp_path: Path) -> None:
    with claim(tmp_path / "run", "r1") as held:
        assert [next_incarnation(held.run_dir, Role.PREFIX, Device()) for _ in range(3)] == [1, 2, 3]
        program = (
            "import sys; from pathlib import Path; from rollplex.protocol.common import *; "
            "from rollplex.protocol.rundir import *; "
            "print(next_incarnation(attach(Path(sys.argv[1])), Role.PREFIX, Device()))"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "run")]
        assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout == b"4\n"
        assert next_incarnation(held.run_dir, Role.PREFIX, Device(index=1)) == 1
        assert next_incarnation(held.run_dir, Role.TRAINER, Device()) == 1
    with claim(tmp_path / "run", "r2") as held:
        assert next_incarnation(held.run_dir, Role.PREFIX, Device()) == 5
        (held.run_dir.incarnations / "prefix-0-0").write_text("five")
        with pytest.raises(ConfigError, match="counter is damaged"):
            next_incarnation(held.run_dir, Role.PREFIX, Device())
