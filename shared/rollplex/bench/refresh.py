"""How long the copies after an update take, beside collectives that bring the same pieces.

    bench (no context)  segments on every device ─► one process a device (`rollplex_trainer.refreshing`), which sees
                        its own device only and maps the others' segments

Owns: segments, processes, what they measured. Does not know: tensors, how a process measures, how it is told
(`refresh_report`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from rollplex.bench.machine import read_machine, read_software
from rollplex.bench.placement import Placement
from rollplex.bench.recipe import Device
from rollplex.bench.refresh_plan import DeviceCopies, collectives, device_copies, rows
from rollplex.bench.refresh_report import PlacementFound, Refreshed, Seconds, told
from rollplex.bench.refresh_wire import Measured, Task
from rollplex.config.environment import child_environment
from rollplex.errors import ConfigError, RollplexError, WaitError
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory import Backend, backend
from rollplex.memory.cuda import CudaBackend
from rollplex.memory.fds import recv, send
from rollplex.multicast import NO_MULTICAST
from rollplex.nvml import GpuInfo, open_gpu
from rollplex.presets import preset_named, write_shape
from rollplex.programs import own
from rollplex.whole_file import write_whole

MODULE: Final = "rollplex_trainer.refreshing"
TASK_S: Final = 300.0
"""For a placement, the processes' start included."""
END_S: Final = 20.0
_MOST_BYTES: Final = 2**20
_TOLD: Final = 2000
_NCCL: Final = {**NO_MULTICAST, "NCCL_SOCKET_IFNAME": "lo"}
"""One host needs no network."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure.

    Attributes:
        preset: the model's sizes.
        placements: all of as many devices.
        repeats, warmup: of each way.
        device: host or cuda.
        gpu: the first one, as nvidia-smi counts.
        out: the folder.
        command: how it was asked for.
    """

    preset: str
    placements: Sequence[Placement]
    repeats: int
    warmup: int
    device: Device
    out: Path
    gpu: int = 0
    command: str = ""


def measure_refresh(wanted: Wanted, *, say: Callable[[str], None]) -> Refreshed:
    """Measure every placement and write refresh.json.

    Raises:
        ConfigError: placements of different numbers of devices, or no such GPU.
        RollplexError: a process failed; says how, and where its log is.
    """
    devices = _devices(wanted.placements)
    gpus = _gpus(wanted, devices)
    preset = preset_named(wanted.preset)
    wanted.out.mkdir(parents=True, exist_ok=True)
    model = write_shape(preset, wanted.out / "model")
    found = Refreshed(
        machine=read_machine(wanted.gpu if gpus else None, devices),
        software=read_software(),
        gpus=tuple(f"{gpu.name} {gpu.uuid}" for gpu in gpus),
        preset=preset.name,
        dtype=preset.dtype,
        repeats=wanted.repeats,
        warmup=wanted.warmup,
        command=wanted.command,
    )
    with _processes(devices, gpus, wanted.out) as processes:
        for placement in wanted.placements:
            one = _measure(placement, wanted, processes, model, preset.dtype)
            found = msgspec.structs.replace(found, placements={**found.placements, str(placement): one})
            write_whole(
                wanted.out / "refresh.json",
                msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n",
                durable=True,
            )
            say(f"{placement}: {told(one)}")
    return found


@dataclass
class _Process:
    """Of one device."""

    sock: socket.socket
    process: subprocess.Popen[bytes]
    log: Path
    memory: Backend
    """That makes segments on its device, from outside."""
    meet: Path

    def ask(self, task: Task, fds: Sequence[int]) -> None:
        with contextlib.suppress(EOFError):  # it ended: `answer` says why
            send(self.sock, msgspec.json.encode(task), fds, TASK_S)

    def answer(self) -> Measured:
        """What it has sent, or is sending. Raises RollplexError if the process ended."""
        try:
            content, _ = recv(self.sock, END_S, _MOST_BYTES, 0)
        except (EOFError, OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip()[-_TOLD:]
            raise RollplexError(
                "A process of the bench ended", got=lines.rpartition("\n")[2] or "no word", where=str(self.log)
            ) from None
        return msgspec.json.decode(content, type=Measured)


def _measure(
    placement: Placement, wanted: Wanted, processes: Sequence[_Process], model: Path, dtype: str
) -> PlacementFound:
    shape = read_shape(model)
    table = parameter_table(shape, dtype=dtype, freeze_vision=False)
    copies = device_copies(placement, table, shape)
    sizes = tuple(each.plan.storage.total_bytes for each in copies)
    measured: list[Measured] = []
    if any(each.transfers for each in copies):
        with _segments(processes, sizes) as fds:
            for device, process in enumerate(processes):
                task = Task(
                    model=str(model.absolute()),
                    dtype=dtype,
                    placement=placement,
                    device=device,
                    sizes=sizes,
                    memory=wanted.device,
                    meet=str(process.meet),
                    collective_s=TASK_S / 2,
                    repeats=wanted.repeats,
                    warmup=wanted.warmup,
                )
                process.ask(task, fds)
            measured = _answers(processes)
    return _found(copies, measured)


def _answers(processes: Sequence[_Process]) -> list[Measured]:
    """In the order of devices; taken as they come, so that the one that ends is named, and not those that wait for it.

    Raises:
        RollplexError: a process ended.
        WaitError: some say nothing for too long.
    """
    found: dict[int, Measured] = {}
    end = time.monotonic() + TASK_S
    while len(found) < len(processes):
        waiting = {process.sock: device for device, process in enumerate(processes) if device not in found}
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise WaitError(
                "Processes of the bench say nothing",
                got=f"no answer within {TASK_S:g} s",
                where=", ".join(f"device {device}" for device in waiting.values()),
            )
        found |= {waiting[sock]: processes[waiting[sock]].answer() for sock in ready}
    return [found[device] for device in range(len(processes))]


def _found(copies: Sequence[DeviceCopies], measured: Sequence[Measured]) -> PlacementFound:
    given = rows(copies)
    used = collectives(copies)
    arriving = [
        sum(given[source].size_bytes for one in used if each.device in one.members for source in one.sources)
        - (given[each.device].size_bytes if each.device in given else 0)
        for each in copies
    ]
    by_copies = {device: digest for one in measured for device, digest in one.copied.items()}
    return PlacementFound(
        copied_bytes=tuple(each.copied_bytes for each in copies),
        remote_bytes=tuple(each.remote_bytes for each in copies),
        pieces=max(len(each.transfers) for each in copies),
        copies=_slowest([one.copies_s for one in measured]),
        one_piece=_slowest([one.one_piece_s for one in measured]),
        collective=_slowest([one.collective_s for one in measured]),
        packed=_slowest([one.packed_s for one in measured]),
        digest=_slowest([one.digest_s for one in measured]),
        kinds=tuple(dict.fromkeys(one.kind for one in used)),
        collective_bytes=max(arriving),
        backend=next((one.collective_backend for one in measured if one.collective_backend), ""),
        same=all(one.gathered in ("", by_copies.get(device)) for device, one in enumerate(measured)),
    )


def _slowest(times: Sequence[tuple[float, ...]]) -> Seconds | None:
    found = [max(repeat) for repeat in zip(*(each for each in times if each), strict=True)]
    return Seconds(median=statistics.median(found), low=min(found), high=max(found)) if found else None


def _devices(placements: Sequence[Placement]) -> int:
    numbers = {placement.devices for placement in placements}
    if len(numbers) != 1 or numbers == {1}:
        raise ConfigError(
            "The placements of one bench have the same number of devices, two or more",
            got=", ".join(f"{placement}: {placement.devices}" for placement in placements),
            where="--placements",
        )
    return numbers.pop()


def _gpus(wanted: Wanted, devices: int) -> list[GpuInfo]:
    found = []
    for index in range(wanted.gpu, wanted.gpu + devices) if wanted.device == "cuda" else ():
        gpu = open_gpu(index)
        found.append(gpu.info)
        gpu.close()
    return found


@contextmanager
def _segments(processes: Sequence[_Process], sizes: Sequence[int]) -> Iterator[list[int]]:
    """One on each device; they are gone when everybody has closed them."""
    fds: list[int] = []
    try:
        for process, size_bytes in zip(processes, sizes, strict=True):
            fds.append(process.memory.create(size_bytes, "refresh"))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def _processes(devices: int, gpus: Sequence[GpuInfo], out: Path) -> Iterator[list[_Process]]:
    """One a device; they end with the block."""
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    with ExitStack() as stack:
        meet = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollplex-"))) / "meet"
        started: list[_Process] = []
        stack.callback(_end, started)
        for device in range(devices):
            memory: Backend = CudaBackend(uuid=gpus[device].uuid) if gpus else backend("host")
            variables = _NCCL | ({"CUDA_VISIBLE_DEVICES": gpus[device].uuid} if gpus else {})
            started.append(_start(logs / f"refresh-{device}.log", memory, meet, variables))
        yield started


def _start(log: Path, memory: Backend, meet: Path, variables: dict[str, str]) -> _Process:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            own(MODULE, str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            env=child_environment(threads=1) | variables,
        )
    return _Process(sock=ours, process=process, log=log, memory=memory, meet=meet)


def _end(started: Sequence[_Process]) -> None:
    """They see their socket closed; who does not end is killed."""
    for one in started:
        one.sock.close()
    for one in started:
        try:
            one.process.wait(END_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait(END_S)
