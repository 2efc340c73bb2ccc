"""A program's start and end, and what it leaves behind."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from rollplex.conformance.program import Program
from rollplex.errors import ConfigError
from rollplex.session import session_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (folder := tmp_path / "run").mkdir()
    return folder


def program(text: str, run_dir: Path) -> Program:
    return Program([sys.executable, "-S", "-c", text], run_dir, run_dir.parent / "log")


def ended(running: Program) -> Program:
    end = time.monotonic() + 20
    while running.exit_code is None and time.monotonic() < end:
        time.sleep(0.01)
    return running


def test_it_gets_what_a_supervisor_would_add(run_dir: Path) -> None:
    text = "import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.getsid(0) == os.getpid())"
    found = ended(program(text, run_dir))
    assert found.log == f"['--run-dir', '{run_dir}', '--device', '0:0', '--incarnation', '1'] 1 True"
    assert found.how == "exit code 0"
    found.end()


def test_a_process_and_a_file_that_stay_are_leftovers_and_the_process_is_ended(run_dir: Path) -> None:
    text = (
        "import os, subprocess, sys\n"
        "open(sys.argv[2] + '/forgotten', 'w').close()\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
    )
    found = ended(program(text, run_dir))
    process, file = found.leftovers()
    assert process.startswith("process ")
    assert file == "file forgotten"
    found.end()
    end = time.monotonic() + 20
    while session_of(found.pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not session_of(found.pid)


def test_named_shared_memory_that_stays_is_a_leftover(run_dir: Path) -> None:
    text = (
        "import mmap, time\n"
        "with open('/dev/shm/rollplex-test-left', 'w+b') as f:\n"
        "    f.write(bytes(4096)); f.flush(); m = mmap.mmap(f.fileno(), 4096)\n"
        "print('mapped', flush=True); time.sleep(60)\n"
    )
    found = program(text, run_dir)
    end = time.monotonic() + 20
    while found.log != "mapped" and time.monotonic() < end:
        time.sleep(0.01)
    try:
        found.look()
        found.signal(signal.SIGKILL)
        assert ended(found).how == "killed by SIGKILL"
        assert found.leftovers() == ["shared memory /dev/shm/rollplex-test-left"]
    finally:
        Path("/dev/shm/rollplex-test-left").unlink(missing_ok=True)  # noqa: S108 - where the kernel has it
        found.end()


def test_a_program_that_is_not_there_is_a_configuration_error(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be started"):
        Program(["/no/such/program"], run_dir, run_dir.parent / "log")
