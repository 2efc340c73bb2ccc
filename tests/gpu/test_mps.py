"""The real daemon on a real GPU: it starts, serves clients, lets one be taken off, and leaves nothing."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollplex.nvml import Gpu, open_gpu
from rollplex_coordinator.processes.environment import GpuAccess
from rollplex_coordinator.processes.mps import Mps

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

UP_S = 60.0
CLIENT = """
import sys, torch
a = torch.ones(1024, 1024, device="cuda")
torch.cuda.synchronize()
print("up", flush=True)
while True:
    a = a @ a / 1024
    torch.cuda.synchronize()
    print("step", flush=True)
"""


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    found = open_gpu(0)
    yield found
    found.close()


@pytest.fixture
def mps(tmp_path: Path, gpu: Gpu) -> Iterator[Mps]:
    daemon = Mps(tmp_path, gpu.info.uuid, os.environ)
    yield daemon
    daemon.stop()


def client(mps: Mps, gpu: Gpu) -> subprocess.Popen[bytes]:
    access = GpuAccess(uuid=gpu.info.uuid, mps=mps.variables, deterministic=True)
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT], env={**os.environ, **access.variables}, stdout=subprocess.PIPE
    )


def says(process: subprocess.Popen[bytes], word: bytes, deadline_s: float = UP_S) -> bool:
    """Whether a line with this word comes in time; False if the process ends before."""
    assert process.stdout is not None
    end = time.monotonic() + deadline_s
    while (left := end - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            return False
        line = process.stdout.readline()
        if not line:
            return False
        if word in line:
            return True
    return False


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits for a parent that never asks (the machine's first process may not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_gpu_is_told_without_using_its_memory(gpu: Gpu) -> None:
    before = gpu.used_bytes()
    assert gpu.info.uuid.startswith("GPU-")
    assert 0 < before < gpu.info.total_bytes
    # Of another process: this one may have a context, of an earlier test.
    code = (
        "import os; from rollplex.nvml import open_gpu; print(os.getpid() in {p.pid for p in open_gpu(0).processes()})"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert asked.stdout.split() == ["False"]


def test_the_daemon_quits_within_seconds_and_leaves_nothing(mps: Mps) -> None:
    assert mps.alive
    start_s = time.monotonic()
    mps.stop()
    assert time.monotonic() - start_s < 8.0
    assert ended(mps.pid)
    assert not mps.folder.exists()


def test_a_client_that_is_taken_off_ends_and_another_goes_on(mps: Mps, gpu: Gpu) -> None:
    one, other = client(mps, gpu), client(mps, gpu)
    try:
        assert says(one, b"up")
        assert says(other, b"up")
        pids = [process.pid for process in gpu.processes()]
        assert one.pid in pids
        assert other.pid in pids
        mps.terminate(one.pid)
        assert one.wait(20) != 0
        for _ in range(3):
            assert says(other, b"step")
    finally:
        for process in (one, other):
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
