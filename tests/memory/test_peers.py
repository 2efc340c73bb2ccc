"""Segments of one GPU in processes that compute on another and see no other: what a rank copies of its peers."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from rollplex.memory.cuda import CudaBackend
from rollplex.memory.fds import recv, send
from rollplex.nvml import Gpu
from support.gpus import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZE = 64 * 2**20
DEADLINE_S = 120.0
Start: TypeAlias = Callable[[str, str], socket.socket]

_PRELUDE = """
import os, signal, socket, sys
import torch
from rollplex.memory import backend
from rollplex.memory.digest import host_lanes
from rollplex.memory.digest_device import mapping_lanes
from rollplex.memory.fds import recv, send
from rollplex.memory.tensors import tensor
sock = socket.socket(fileno=int(sys.argv[1]))
size_bytes = int(sys.argv[2])
fds = recv(sock, 120.0, 0, 2)[1]
def say(found):
    torch.cuda.synchronize()
    send(sock, repr(found).encode(), [], 120.0)
def wait():
    recv(sock, 120.0, 0, 0)
def numbers(mapping):
    return tensor(mapping, 4096, (1000, 1024), torch.bfloat16)
"""


@pytest.fixture
def two() -> Iterator[list[Gpu]]:
    with gpus(2) as found:
        yield found


@pytest.fixture
def fds(two: list[Gpu]) -> Iterator[list[int]]:
    """A segment on each GPU, made by this process, which has no context."""
    made = [CudaBackend(uuid=gpu.info.uuid).create(SIZE, "peer") for gpu in two]
    yield made
    for fd in made:
        os.close(fd)


@pytest.fixture
def start(fds: list[int]) -> Iterator[Start]:
    """start(sight, lines) starts a process that sees the GPUs `sight`, got both segments, and runs `lines`."""
    started: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []

    def run(sight: str, lines: str) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _PRELUDE + textwrap.dedent(lines), str(theirs.fileno()), str(SIZE)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": sight, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        started.append((ours, process))
        send(ours, b"", fds, DEADLINE_S)
        return ours

    yield run
    for sock, process in started:
        sock.close()
        process.kill()
        process.wait(DEADLINE_S)


def answer(sock: socket.socket) -> Any:
    """What a child says next."""
    return ast.literal_eval(recv(sock, DEADLINE_S, 2**20, 0)[0].decode())


def go_on(sock: socket.socket) -> None:
    send(sock, b"", [], DEADLINE_S)


FIRST = """
memory = backend("cuda")
own, peer = (memory.map(fd, size_bytes) for fd in fds)
own.clear()
peer.clear()
cleared = {"zeros": peer.read(size_bytes - 8, 8) == bytes(8)}
peer.write(3_000_000, b"bytes of the host")
peer.store_word(64, 2**63 + 5)
far, near = numbers(peer), numbers(own)
near.copy_(torch.arange(1000.0, device="cuda")[:, None].expand(1000, 1024))
far.copy_(near)
far[:, ::2].add_(1)
far[:100, :512].copy_(near[100:200, :512])
say({
    **cleared,
    "sees": torch.cuda.device_count(),
    "devices": [str(far.device), str(near.device)],
    "pid": os.getpid(),
})
wait()
local = torch.empty_like(near)
local.copy_(far)
strided = far[:, 1::2].contiguous()
host = far.cpu()
content = peer.read(4096, far.nbytes)
say({
    "copied": bool((local == 7).all()),
    "strided": bool((strided == 7).all()),
    "to the host": bool((host == 7).all()),
    "by the driver": content == host.view(torch.uint8).numpy().tobytes(),
    "digest": mapping_lanes(peer, 4096, size_bytes - 4096) == host_lanes(peer.read(4096, size_bytes - 4096)),
    "word": peer.load_word(72),
    "in a kernel": torch.equal(near.float() + far, near.float() + 7),
})
wait()
del far, near, local, strided
own.close()
peer.close()
say(repr(memory.live()))
"""

SECOND = """
memory = backend("cuda")
own = memory.map(fds[1], size_bytes)
mine = numbers(own)
rows = torch.arange(1000.0, device="cuda").to(torch.bfloat16)[:, None].expand(1000, 1024).contiguous()
wanted = rows.clone()
wanted[:, ::2] += 1
wanted[:100, :512] = rows[100:200, :512]
found = {
    "numbers": torch.equal(mine, wanted),
    "bytes": own.read(3_000_000, 17),
    "word": own.load_word(64),
}
mine.fill_(7)
own.store_word(72, 99)
say(found)
wait()
"""


def test_a_process_reads_and_writes_the_memory_of_a_gpu_that_it_does_not_see(two: list[Gpu], start: Start) -> None:
    first = start(two[0].info.uuid, FIRST)
    wrote = answer(first)
    assert (wrote["zeros"], wrote["sees"], wrote["devices"]) == (True, 1, ["cuda:0", "cuda:0"])
    assert wrote["pid"] in {one.pid for one in two[0].processes()}
    assert wrote["pid"] not in {one.pid for one in two[1].processes()}, "it has no context there"
    second = start(two[1].info.uuid, SECOND)
    assert answer(second) == {"numbers": True, "bytes": b"bytes of the host", "word": 2**63 + 5}
    go_on(first)
    read = answer(first)
    assert read.pop("word") == 99
    assert read == dict.fromkeys(read, True)
    go_on(first)
    assert answer(first) == "Live(handles=0, reservations=0, mappings=0)"


def test_gpus_are_told_by_uuid_where_a_process_counts_them_in_another_order(two: list[Gpu], start: Start) -> None:
    used = [gpu.used_bytes() for gpu in two]
    sock = start(
        ",".join(gpu.info.uuid for gpu in reversed(two)),
        f"""
        first, second = (backend("cuda", uuid=uuid) for uuid in {[gpu.info.uuid for gpu in two]})
        made = first.create(4 * 2**30, "large")
        say(None)
        wait()
        os.close(made)
        found = []
        for memory in (first, second):
            mapping = memory.map(fds[0], size_bytes)
            part = tensor(mapping, 0, (1024,), torch.int32)
            if not found:
                part.copy_(torch.arange(1024))
            torch.cuda.synchronize(part.device)
            found.append((memory._device, str(part.device), part.cpu().tolist() == list(range(1024))))
        say(found)
        """,
    )
    answer(sock)
    grown = [gpu.used_bytes() - before for gpu, before in zip(two, used, strict=True)]
    go_on(sock)
    assert grown[0] >= 4 * 2**30 > 2 * grown[1], "the memory is on the GPU that was named"
    assert answer(sock) == [(1, "cuda:1", True), (0, "cuda:0", True)]
