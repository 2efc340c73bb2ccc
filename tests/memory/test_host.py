"""What holds for memfds only: seals, views, real allocation, limits."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollplex.errors import SegmentError
from rollplex.memory.available import Headroom
from rollplex.memory.host import SEALS, HostBackend

SIZE_BYTES = 10_000


@pytest.fixture
def memory() -> HostBackend:
    return HostBackend()


@pytest.fixture
def fd(memory: HostBackend) -> Iterator[int]:
    descriptor = memory.create(SIZE_BYTES, "test")
    yield descriptor
    os.close(descriptor)


def unsealed(size_bytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, size_bytes)
    return fd


def test_a_segment_can_be_neither_shrunk_nor_grown_nor_sealed_further(fd: int) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: os.truncate(fd, SIZE_BYTES - 1),
        lambda: os.truncate(fd, SIZE_BYTES + 1),
        lambda: os.posix_fallocate(fd, 0, SIZE_BYTES + 1),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ]
    for attempt in attempts:
        with pytest.raises(PermissionError):
            attempt()
    assert os.fstat(fd).st_size == SIZE_BYTES


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL, SEALS])
def test_a_memfd_without_a_seal_is_refused_before_mapping(
    memory: HostBackend, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = unsealed(SIZE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS & ~missing)
    monkeypatch.setattr("mmap.mmap", None)
    with pytest.raises(SegmentError, match="seals") as caught:
        memory.map(fd, SIZE_BYTES)
    assert caught.value.needed.startswith("SHRINK | GROW | SEAL")
    assert caught.value.got != caught.value.needed
    os.close(fd)


def test_a_memfd_that_is_sealed_against_writing_is_refused(memory: HostBackend) -> None:
    for write_seal in (fcntl.F_SEAL_WRITE, 0x10):
        fd = unsealed(SIZE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, write_seal)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        with pytest.raises(SegmentError, match="WRITE"):
            memory.map(fd, SIZE_BYTES)
        os.close(fd)


def test_an_ordinary_file_is_refused(memory: HostBackend, tmp_path: Path) -> None:
    on_tmpfs = Path("/dev/shm")  # noqa: S108 - a file there knows of seals and has none of ours
    for folder in (tmp_path, on_tmpfs):
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(SIZE_BYTES)
            with pytest.raises(SegmentError):
                memory.map(file.fileno(), SIZE_BYTES)


def test_the_pages_are_really_allocated_at_once(memory: HostBackend) -> None:
    fd = memory.create(8 * 2**20, "test")
    assert os.fstat(fd).st_blocks * 512 == 8 * 2**20
    os.close(fd)


def test_a_descriptor_of_a_segment_does_not_pass_to_child_programs(fd: int) -> None:
    assert not os.get_inheritable(fd)


def test_a_limit_of_the_process_is_a_segment_error_and_leaves_nothing() -> None:
    script = """
import os, resource, sys
from rollplex.errors import SegmentError
from rollplex.memory.host import HostBackend
def attempt(kind, limit):
    before = len(os.listdir("/proc/self/fd"))
    old = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, old[1]))
    try:
        HostBackend().create(2**20, "limited")
    except SegmentError as error:
        resource.setrlimit(kind, old)
        assert error.got and error.needed and error.do, error
        assert "1048576 bytes (limited)" in error.got
        assert len(os.listdir("/proc/self/fd")) == before
        return
    sys.exit(f"{kind}: no error")
attempt(resource.RLIMIT_FSIZE, 2**19)
attempt(resource.RLIMIT_NOFILE, 3)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20.0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_no_space_is_a_segment_error_and_leaves_no_descriptor(
    memory: HostBackend, code: int, monkeypatch: pytest.MonkeyPatch, open_fds: Callable[[], set[str]]
) -> None:
    def full(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(code, os.strerror(code))

    before = open_fds()
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(SegmentError, match=os.strerror(code)) as caught:
        memory.create(SIZE_BYTES, "test")
    assert caught.value.needed
    assert caught.value.do
    assert open_fds() == before


def test_more_than_is_available_is_refused_before_the_kernel_is_asked(
    monkeypatch: pytest.MonkeyPatch, open_fds: Callable[[], set[str]]
) -> None:
    before = open_fds()
    monkeypatch.setattr("os.posix_fallocate", None)
    memory = HostBackend(Headroom(lambda: SIZE_BYTES - 1))
    with pytest.raises(SegmentError, match="too little memory") as caught:
        memory.create(SIZE_BYTES, "weights")
    assert caught.value.got == "10000 bytes asked for (weights)"
    assert "9999 bytes" in caught.value.needed
    assert open_fds() == before


def test_address_space_that_is_used_up_is_a_segment_error() -> None:
    script = """
import resource
from rollplex.errors import SegmentError
from rollplex.memory.host import HostBackend
fd = HostBackend().create(2**26, "x")
resource.setrlimit(resource.RLIMIT_AS, (2**24, resource.RLIM_INFINITY))
try:
    HostBackend().map(fd, 2**26)
except SegmentError as error:
    assert str(2**26) in error.needed, error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20.0)


def test_views_are_the_segment_itself(memory: HostBackend, fd: int) -> None:
    with memory.map(fd, SIZE_BYTES) as mapping:
        numbers = np.frombuffer(mapping.view(800, 80), dtype=np.float64)
        numbers[:] = np.arange(10)
        assert np.frombuffer(mapping.read(800, 80), dtype=np.float64).tolist() == list(range(10))
        mapping.buffer[800:808] = np.float64(77).tobytes()
        assert numbers[0] == 77
        del numbers


def test_close_refuses_while_anything_views_the_bytes_and_then_still_works(memory: HostBackend, fd: int) -> None:
    def look(kind: str) -> object:
        match kind:
            case "buffer":
                return mapping.buffer
            case "view":
                return mapping.view(10, 0)
            case "slice":
                return mapping.buffer[5:6]
            case _:
                return np.frombuffer(mapping.buffer, dtype=np.uint8)[3:7]

    mapping = memory.map(fd, SIZE_BYTES)
    for kind in ("buffer", "view", "slice", "array"):
        looking = look(kind)
        with pytest.raises(SegmentError, match="looks at it"):
            mapping.close()
        assert not mapping.closed
        mapping.write(0, kind.encode())
        assert mapping.read(0, len(kind)) == kind.encode()
        del looking
    mapping.close()
    assert mapping.closed


def test_close_does_not_count_what_only_a_reference_cycle_keeps(memory: HostBackend, fd: int) -> None:
    mapping = memory.map(fd, SIZE_BYTES)
    cycle: list[object] = [mapping.buffer]
    cycle.append(cycle)
    del cycle
    mapping.close()
    assert mapping.closed


def test_a_refused_view_leaves_nothing_that_blocks_close(memory: HostBackend, fd: int) -> None:
    mapping = memory.map(fd, SIZE_BYTES)
    with pytest.raises(SegmentError):
        mapping.view(0, SIZE_BYTES + 1)
    mapping.close()
