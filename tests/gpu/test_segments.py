"""Segments in the memory of a real GPU: between processes that have a context and a holder that has none.

This process makes no context here: it holds descriptors, as a coordinator does. Each case runs with the children taking
turns on the GPU, and as clients of an MPS daemon.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from rollplex.errors import SegmentError
from rollplex.memory.cuda import CudaBackend
from rollplex.memory.fds import recv, send
from rollplex.memory.placement import GRANULE_BYTES
from rollplex.nvml import Gpu, open_gpu
from rollplex_coordinator.processes.mps import Mps

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZE = 64 * 2**20
DEADLINE_S = 60.0
NOISE = 64 * 2**20
"""What the driver may take or give back by itself."""
Start: TypeAlias = Callable[[str], tuple[socket.socket, "subprocess.Popen[bytes]"]]

_PRELUDE = """
import os, signal, socket, sys
from rollplex.errors import SegmentError
from rollplex.memory import backend
from rollplex.memory.fds import recv, send
sock = socket.socket(fileno=int(sys.argv[1]))
size_bytes = int(sys.argv[2])
memory = backend("cuda")
fd = recv(sock, 60.0, 0, 1)[1][0]
"""


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    found = open_gpu(0)
    yield found
    found.close()


@pytest.fixture(params=["turns", "mps"])
def environment(request: pytest.FixtureRequest, gpu: Gpu, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a child needs to use the GPU."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.info.uuid, "PYTHONPATH": os.pathsep.join(sys.path)}
    if request.param == "turns":
        yield variables
        return
    daemon = Mps(tmp_path, gpu.info.uuid, os.environ)
    try:
        yield variables | daemon.variables
    finally:
        daemon.stop()


@pytest.fixture
def memory(gpu: Gpu) -> CudaBackend:
    return CudaBackend(uuid=gpu.info.uuid)


@pytest.fixture
def fd(memory: CudaBackend) -> Iterator[int]:
    descriptor = memory.create(SIZE, "test")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def start(environment: dict[str, str], fd: int) -> Iterator[Start]:
    """start(lines) starts a process that got the segment as `fd` and runs `lines`."""
    started: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []

    def run(lines: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _PRELUDE + textwrap.dedent(lines), str(theirs.fileno()), str(SIZE)],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        started.append((ours, process))
        send(ours, b"", [fd], DEADLINE_S)
        return ours, process

    yield run
    for sock, process in started:
        sock.close()
        process.kill()
        process.wait(DEADLINE_S)


def settled(gpu: Gpu, before_bytes: int) -> bool:
    """Whether the GPU's memory comes back to what it was, within a few seconds."""
    end = time.monotonic() + 5
    while gpu.used_bytes() - before_bytes >= NOISE and time.monotonic() < end:
        time.sleep(0.05)
    return gpu.used_bytes() - before_bytes < NOISE


def answer(sock: socket.socket) -> bytes:
    """What a child says next."""
    return recv(sock, DEADLINE_S, 2**20, 0)[0]


def test_another_process_reads_what_one_has_written(start: Start) -> None:
    writer, _ = start(
        """
        mapping = memory.map(fd, size_bytes)
        mapping.clear()
        mapping.write(5_000_000, b"written there")
        mapping.store_word(4096, 2**63 + 5)
        send(sock, b"", [], 60.0)
        signal.pause()
        """
    )
    answer(writer)
    reader, _ = start(
        """
        mapping = memory.map(fd, size_bytes)
        send(sock, mapping.read(5_000_000, 13), [], 60.0)
        send(sock, str(mapping.load_word(4096)).encode(), [], 60.0)
        send(sock, str(sum(mapping.read(0, 4096))).encode(), [], 60.0)
        """
    )
    assert [answer(reader) for _ in range(3)] == [b"written there", str(2**63 + 5).encode(), b"0"]


def test_contents_outlive_every_cuda_process_as_long_as_the_holder_keeps_the_descriptor(start: Start, gpu: Gpu) -> None:
    processes = []
    for number in range(2):
        sock, process = start(
            f"""
            mapping = memory.map(fd, size_bytes)
            mapping.write({number} * 2**20, bytes([{number} + 1]) * 2**20)
            send(sock, b"", [], 60.0)
            signal.pause()
            """
        )
        answer(sock)
        processes.append(process)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert {one.pid for one in gpu.processes()}.isdisjoint({process.pid for process in processes})
    reader, _ = start(
        """
        mapping = memory.map(fd, size_bytes)
        content = mapping.read(0, 2 * 2**20)
        send(sock, repr([content == bytes([1]) * 2**20 + bytes([2]) * 2**20]).encode(), [], 60.0)
        """
    )
    assert answer(reader) == b"[True]"


def test_300_attachments_leave_the_gpu_as_it_was(start: Start, gpu: Gpu) -> None:
    sock, _ = start(
        """
        import torch
        from rollplex.memory.tensors import tensor
        torch.zeros(1, device="cuda")
        for number in range(300):
            with memory.map(fd, size_bytes) as mapping:
                tensor(mapping, 0, (1024,), torch.float32).fill_(number)
            if number in (0, 299):
                torch.cuda.synchronize()
                send(sock, repr(memory.live()).encode(), [], 60.0)
                recv(sock, 60.0, 0, 0)
        """
    )
    used = []
    for _ in range(2):
        assert answer(sock) == b"Live(handles=0, reservations=0, mappings=0)"
        used.append(gpu.used_bytes())
        send(sock, b"", [], DEADLINE_S)
    assert abs(used[1] - used[0]) < NOISE


def test_a_holder_has_no_context_and_costs_the_bytes_that_it_holds(
    start: Start, gpu: Gpu, environment: dict[str, str]
) -> None:
    before = gpu.used_bytes()
    sock, process = start(
        """
        made = memory.create(2 * 2**30, "held")
        send(sock, b"made", [], 60.0)
        signal.pause()
        """
    )
    assert answer(sock) == b"made"
    assert 2**31 <= gpu.used_bytes() - before < 2**31 + 2 * NOISE  # a daemon's server may start meanwhile: 66 MiB
    if "CUDA_MPS_PIPE_DIRECTORY" not in environment:  # a daemon lists every process that opened the driver
        assert process.pid not in {one.pid for one in gpu.processes()}
    process.kill()
    process.wait(DEADLINE_S)
    assert settled(gpu, before + NOISE)


def test_memory_is_given_back_with_the_last_descriptor_and_a_forgotten_release_is_seen(
    memory: CudaBackend, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = 2 * 2**30
    before = gpu.used_bytes()
    made = memory.create(large, "large")
    assert large <= gpu.used_bytes() - before < large + NOISE
    os.close(made)
    assert settled(gpu, before)
    handles = memory.live().handles
    with monkeypatch.context() as patch:
        kept = []
        patch.setattr("rollplex.memory.cuda_driver.Driver.release", lambda _, handle: kept.append(handle))
        os.close(memory.create(large, "leaked"))
    assert memory.live().handles == handles + 1
    assert gpu.used_bytes() - before >= large, "the handle keeps the memory, as the count says"
    memory._driver.release(kept[0])
    assert (memory.live().handles, settled(gpu, before)) == (handles, True)


def test_tensors_of_every_dtype_are_the_segment_itself(start: Start) -> None:
    sock, _ = start(
        """
        import torch
        from rollplex.memory.tensors import DTYPES, require_mapped, tensor
        mapping = memory.map(fd, size_bytes)
        mapping.clear()
        base = mapping.device_view(0, 1).__cuda_array_interface__["data"][0]
        wrong = []
        for place, dtype in enumerate([*DTYPES.values(), torch.uint8, torch.int64, torch.int32, torch.float16]):
            offset = 4096 * (place + 1)
            one = tensor(mapping, offset, (3, 5), dtype)
            one.copy_(torch.arange(15).view(3, 5))
            require_mapped(mapping, {"one": one})
            want = torch.arange(15).to(dtype).view(torch.uint8).numpy().tobytes()
            if one.data_ptr() != base + offset or one.dtype != dtype or mapping.read(offset, len(want)) != want:
                wrong.append(str(dtype))
        assert tensor(mapping, 0, (0, 3), torch.float32).shape == (0, 3)
        try:
            require_mapped(mapping, {"copy": one.clone()})
            wrong.append("a copy passed")
        except SegmentError:
            pass
        part = one[1:].t()
        del one
        try:
            mapping.close()
            wrong.append("closed under a tensor")
        except SegmentError:
            pass
        del part
        mapping.close()
        send(sock, repr((wrong, memory.live())).encode(), [], 60.0)
        """
    )
    assert answer(sock) == b"([], Live(handles=0, reservations=0, mappings=0))"


def test_another_size_than_the_segment_has_is_refused_by_a_process_that_did_not_make_it(start: Start) -> None:
    sock, _ = start(
        f"""
        said = []
        for wrong in (size_bytes + 1, size_bytes + {GRANULE_BYTES}, size_bytes - {GRANULE_BYTES}, 1, 0):
            try:
                memory.map(fd, wrong)
                said.append(wrong)
            except SegmentError as error:
                if "another size" not in str(error):
                    said.append(str(error))
        reader, writer = os.pipe()
        for strange in (reader, sock.fileno(), os.open("/dev/null", os.O_RDWR), os.memfd_create("x")):
            try:
                memory.map(strange, size_bytes)
                said.append(strange)
            except SegmentError:
                pass
        with memory.map(fd, size_bytes):
            send(sock, repr((said, memory.live())).encode(), [], 60.0)
        """
    )
    assert answer(sock) == b"([], Live(handles=0, reservations=1, mappings=1))"


def test_a_device_digest_is_the_hosts_and_takes_little_scratch(start: Start) -> None:
    sock, _ = start(
        """
        import torch
        from rollplex.memory.digest import host_lanes
        from rollplex.memory.digest_device import mapping_lanes
        from rollplex.memory.tensors import tensor
        mapping = memory.map(fd, size_bytes)
        torch.manual_seed(1)
        whole = tensor(mapping, 0, (size_bytes,), torch.uint8)
        whole.random_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        size = size_bytes - 4096 - 3
        found = mapping_lanes(mapping, 4096, size)
        scratch = torch.cuda.max_memory_allocated() - before
        same = found == host_lanes(mapping.read(4096, size))
        whole[5000] += 1
        changed = mapping_lanes(mapping, 4096, size)
        send(sock, repr((same, found != changed, scratch < 80 * 2**20)).encode(), [], 60.0)
        """
    )
    assert answer(sock) == b"(True, True, True)"


def test_a_gpu_is_found_by_its_uuid_and_none_by_another(gpu: Gpu, memory: CudaBackend) -> None:
    assert memory._driver.uuid(memory._device) == gpu.info.uuid
    with pytest.raises(SegmentError, match=gpu.info.uuid):
        CudaBackend(uuid="GPU-00000000-0000-0000-0000-000000000000")
