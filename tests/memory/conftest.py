"""Backends, and other processes that map the same segments."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from rollplex.layout.parameters import ParameterTable, parameter_table
from rollplex.layout.shape import ModelShape
from rollplex.layout.vision import VisionShape
from rollplex.memory import Backend, Mapping, backend
from rollplex.memory.cuda import CudaBackend
from rollplex.memory.fds import send

BACKENDS = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
DEADLINE_S = 20.0

_PRELUDE = """
import os, signal, socket, sys
from rollplex.memory import backend
from rollplex.memory.fds import recv, send
sock = socket.socket(fileno=int(sys.argv[1]))
memory = backend(sys.argv[2])
name, fds = recv(sock, 20.0, 100, 1)
size_bytes = int(name)
mapping = memory.map(fds[0], size_bytes)
"""


class Cleared(CudaBackend):
    """A GPU's segments as they are after their first writer has cleared them."""

    def create(self, size_bytes: int, name: str) -> int:
        fd = super().create(size_bytes, name)
        with self.map(fd, size_bytes) as mapping:
            mapping.clear()
        return fd


@pytest.fixture(params=BACKENDS)
def memory(request: pytest.FixtureRequest) -> Backend:
    """Each kind of memory that this machine has."""
    if request.param == "host":
        return backend("host")
    made = Cleared()
    os.close(made.create(1, "warm"))  # the driver opens files of its own with the first segment of a process
    return made


@pytest.fixture
def open_fds() -> Callable[[], set[str]]:
    """The descriptors that this process holds now: number and what it names."""

    def now() -> set[str]:
        found = set()
        for link in Path("/proc/self/fd").iterdir():
            try:
                found.add(f"{link.name} {link.readlink()}")
            except FileNotFoundError:
                continue  # the one that listed the folder
        return found

    return now


@pytest.fixture
def new_mapping(memory: Backend) -> Iterator[Callable[[int], Mapping]]:
    """new_mapping(size_bytes) makes and maps a segment. It is closed after the test, whose tensors must be gone."""
    mappings: list[Mapping] = []

    def new(size_bytes: int) -> Mapping:
        fd = memory.create(size_bytes, "test")
        try:
            mappings.append(memory.map(fd, size_bytes))
        finally:
            os.close(fd)
        return mappings[-1]

    yield new
    for mapping in mappings:
        mapping.close()


StartOther: TypeAlias = Callable[[int, str], tuple[socket.socket, "subprocess.Popen[bytes]"]]


@pytest.fixture
def other(memory: Backend) -> Iterator[StartOther]:
    """other(fd, lines) starts another process that maps the segment `fd` as `mapping` and runs `lines`; it returns our
    end of the stream between the two (`sock` there) and the process, which is ended after the test."""
    started: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []

    def start(fd: int, lines: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _PRELUDE + textwrap.dedent(lines), str(theirs.fileno()), memory.name],
                pass_fds=[theirs.fileno()],
            )
        started.append((ours, process))
        send(ours, str(memory.size(fd)).encode(), [fd], DEADLINE_S)
        return ours, process

    yield start
    for sock, process in started:
        sock.close()
        process.kill()
        process.wait(DEADLINE_S)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a unix stream."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, two:
        yield one, two


@pytest.fixture
def shape() -> ModelShape:
    """A small model with every kind of padding: vocabulary 70 to 128, vision MLP 20 to 24."""
    vision = VisionShape(
        depth=1,
        hidden=16,
        intermediate=20,
        heads=2,
        patch=2,
        temporal_patch=2,
        merge=2,
        in_channels=3,
        window=8,
        full_attention_blocks=(0,),
        out_hidden=24,
        tokens_per_second=2,
    )
    return ModelShape(
        hidden=24,
        layers=2,
        heads=3,
        kv_heads=1,
        head_dim=8,
        intermediate=40,
        vocab=70,
        tied=False,
        mrope_section=(1, 1, 2),
        rope_theta=1e6,
        rms_eps=1e-6,
        vision=vision,
        image_id=1,
        video_id=2,
        vision_start_id=3,
        vision_end_id=4,
    )


@pytest.fixture
def table(shape: ModelShape) -> ParameterTable:
    return parameter_table(shape, dtype="float32", freeze_vision=False)
