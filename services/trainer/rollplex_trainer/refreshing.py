"""`python -m rollplex_trainer.refreshing SOCKET`: one device's process of `rollplex bench refresh`.

Measures the copies that a trainer makes after an update (`transfer.Destination.fill`), and collectives that bring the
same pieces. Owns: what is timed. Does not know: which placements, other processes but through the group, tables.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rollplex.bench.refresh_plan import Collective, DeviceCopies, Row, collectives, device_copies, rows
from rollplex.bench.refresh_wire import Measured, Task
from rollplex.layout.parameters import ParameterTable, parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory import backend
from rollplex.memory.fds import MAX_FDS, recv, send
from rollplex.memory.segment import Mapping
from rollplex.model.device import finish, torch_device, trim
from rollplex.model.parallel.group import Groups, meet
from rollplex.model.parallel.views import place_view, shard_views
from rollplex.protocol.common import Memory, Parallel
from rollplex_trainer.transfer import Destination, numbers_of, own_destination, target_destination

RUN_ID = "bench"
WAIT_S = 600.0
"""For the next task, or the bench's end."""
MOST_BYTES = 2**20
_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Its name since torch 2.13, and before."""


def serve(sock: socket.socket) -> None:
    """Do tasks until the bench closes the socket."""
    groups: Groups | None = None
    while True:
        try:
            content, fds = recv(sock, WAIT_S, MOST_BYTES, MAX_FDS)
        except EOFError:
            break
        task = msgspec.json.decode(content, type=Task)
        groups = groups or _meet(task)
        with ExitStack() as stack:
            mappings = [_open(fd, size, task.memory, stack) for fd, size in zip(fds, task.sizes, strict=True)]
            measured = _Measuring(task, mappings, groups).measure()
        send(sock, msgspec.json.encode(measured), [], WAIT_S)
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(task: Task) -> Groups:
    devices = task.placement.devices
    place = Parallel(training=devices, rank=task.device, meet=task.meet, collective_s=task.collective_s)
    return meet(place, devices, _device(task))


def _device(task: Task) -> torch.device:
    return torch_device(Memory.CUDA if task.memory == "cuda" else Memory.HOST)


def _open(fd: int, size_bytes: int, memory: str, stack: ExitStack) -> Mapping:
    try:
        return stack.enter_context(backend(memory).map(fd, size_bytes))
    finally:
        os.close(fd)


@dataclass
class _Traffic:
    """This process's part of one collective."""

    collective: Collective
    group: dist.ProcessGroup | None
    given: Tensor | None
    """Its own row, if it gives one."""
    taken: dict[int, Tensor]
    """By source, rows that arrive; a row of its own among them is nobody's."""
    together: Tensor | None = None
    """An all-gather's rows, one after the other."""


class _Measuring:
    """One task."""

    def __init__(self, task: Task, mappings: Sequence[Mapping], groups: Groups) -> None:
        self._task, self._group = task, groups.tensor
        self._device = _device(task)
        shape = read_shape(Path(task.model))
        self._table: ParameterTable = parameter_table(shape, dtype=task.dtype, freeze_vision=False)
        self._copies = device_copies(task.placement, self._table, shape)
        self._rows = rows(self._copies)
        self._mappings = mappings
        self._numbers = [
            numbers_of(mapping, self._table, each.plan.storage.total_bytes)
            for mapping, each in zip(mappings, self._copies, strict=True)
        ]
        self._own = self._copies[task.device]

    def measure(self) -> Measured:
        self._mappings[self._task.device].clear()
        self._draw()
        written = [(each, self._destination(each)) for each in self._copies if self._writes(each)]
        self._barrier()
        copies_s = self._times(lambda: self._copy(written)) if written else self._others()
        copied = {each.device: destination.digest() for each, destination in written}
        digest_s = self._times(lambda: [destination.digest() for _, destination in written])
        self._barrier()
        collective_s, packed_s = self._collectives()
        gathered = self._digest() if self._own.remote else ""
        self._barrier()
        one_piece_s = self._one_piece(written)
        self._barrier()
        trim(self._device)
        return Measured(
            copies_s=copies_s,
            one_piece_s=one_piece_s,
            collective_s=collective_s,
            packed_s=packed_s,
            digest_s=digest_s if written else (),
            copied=copied,
            gathered=gathered,
            collective_backend=_carrier(self._device),
        )

    # --- copies

    def _writes(self, each: DeviceCopies) -> bool:
        return each.writer == self._task.device and bool(each.transfers)

    def _draw(self) -> None:
        """Numbers of its own on each device that trains."""
        if not self._own.trains:
            return
        draw = torch.Generator(self._device).manual_seed(self._task.device)
        for shard in shard_views(self._numbers[self._task.device], self._own.plan.training).values():
            shard.normal_(generator=draw)
        finish(self._device)

    def _destination(self, each: DeviceCopies) -> Destination:
        mapping = self._mappings[each.device]
        if each.trains:
            return own_destination(mapping, self._table, RUN_ID, each.plan)
        return target_destination(mapping, self._table, RUN_ID, each.plan, each.training)

    def _copy(self, written: Sequence[tuple[DeviceCopies, Destination]]) -> None:
        for each, destination in written:
            destination.fill([self._numbers[device] for device in each.sources], first=False)

    def _one_piece(self, written: Sequence[tuple[DeviceCopies, Destination]]) -> tuple[float, ...]:
        """As many bytes as copies move between this device and a peer, without pieces; last, since it leaves the
        segments of devices that only sample as they were not."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for each, _ in written:
            if not each.remote:
                continue
            source = self._bytes(each.source(each.remote[0]))[: each.remote_bytes]
            own = torch.empty_like(source) if each.trains else self._bytes(each.device)[: len(source)]
            pairs.append((own, source[: len(own)]))

        def copy() -> None:
            for target, source in pairs:
                target.copy_(source)

        return self._times(copy) if pairs else self._others()

    def _bytes(self, device: int) -> Tensor:
        """Of a device's segment, without the header."""
        return self._numbers[device].view(torch.uint8)[self._table.header_bytes :]

    def _digest(self) -> str:
        return self._destination(self._own).digest()

    # --- collectives

    def _collectives(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds alone, and with packing; what copies brought is taken away before, so that it can be compared."""
        traffic = [self._traffic(one) for one in self._joined()]
        own = self._numbers[self._task.device]
        for transfer in self._own.remote:
            place_view(own, transfer.target, transfer.parameter).zero_()
        finish(self._device)
        pack = [pair for one in traffic for pair in self._packing(one)]
        unpack = self._unpacking(traffic)

        def bring() -> None:
            for one in traffic:
                self._bring(one)

        def whole() -> None:
            for target, source in pack:
                target.copy_(source)
            bring()
            for target, source in unpack:
                target.copy_(source)

        if not self._rows:
            return (), ()
        alone_s = self._times(bring)
        return alone_s, self._times(whole)

    def _joined(self) -> list[tuple[Collective, dist.ProcessGroup | None]]:
        """Groups are made by all processes, in one order."""
        found: list[tuple[Collective, dist.ProcessGroup | None]] = []
        for one in collectives(self._copies):
            everybody = len(one.members) == self._task.placement.devices
            made: Any = self._group.process_group if everybody else dist.new_group(list(one.members))
            group: dist.ProcessGroup | None = made
            if self._task.device in one.members:
                found.append((one, group))
        return found

    def _traffic(self, joined: tuple[Collective, dist.ProcessGroup | None]) -> _Traffic:
        one, group = joined
        device = self._task.device
        if one.kind == "all-gather":
            size = self._rows[device].size_bytes
            together = self._empty(size * len(one.members))
            taken = dict(zip(one.members, torch.split(together, size), strict=True))
            return _Traffic(one, group, given=self._empty(size), taken=taken, together=together)
        row = self._empty(self._rows[one.sources[0]].size_bytes)
        return _Traffic(one, group, given=row if device in one.sources else None, taken={one.sources[0]: row})

    def _bring(self, one: _Traffic) -> None:
        if one.together is not None and one.given is not None:
            _gather(one.together, one.given, group=one.group)
        else:
            source = one.collective.sources[0]
            dist.broadcast(one.taken[source], src=source, group=one.group)

    def _packing(self, one: _Traffic) -> list[tuple[Tensor, Tensor]]:
        """(place in the row, place in the segment)."""
        if one.given is None:
            return []
        row, own = self._rows[self._task.device], self._numbers[self._task.device]
        pairs = []
        for (parameter, place), offset in zip(row.pieces, row.offsets, strict=True):
            source = place_view(own, place, parameter)
            pairs.append((_piece(one.given, offset, source), source))
        return pairs

    def _unpacking(self, traffic: Sequence[_Traffic]) -> list[tuple[Tensor, Tensor]]:
        """(place in the segment, place in a row)."""
        taken: dict[int, tuple[Row, Tensor]] = {}
        for one in traffic:
            taken |= {source: (self._rows[source], row) for source, row in one.taken.items()}
        own = self._numbers[self._task.device]
        pairs = []
        for transfer in self._own.transfers:
            target = place_view(own, transfer.target, transfer.parameter)
            source = self._own.source(transfer)
            if source == self._task.device:
                pairs.append((target, place_view(own, transfer.source, transfer.parameter)))
                continue
            row, content = taken[source]
            pairs.append((target, _piece(content, row.offset(transfer), target)))
        return pairs

    def _empty(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    # --- time

    def _times(self, work: Callable[[], object]) -> tuple[float, ...]:
        """Seconds of each repeat; the first ones do not count."""
        found = []
        for _ in range(self._task.warmup + self._task.repeats):
            self._barrier()
            begin_s = time.perf_counter()
            work()
            finish(self._device)
            found.append(time.perf_counter() - begin_s)
        return tuple(found[self._task.warmup :])

    def _others(self) -> tuple[float, ...]:
        """While others measure something that this process has no part in."""
        self._times(lambda: None)
        return ()

    def _barrier(self) -> None:
        """All processes are here, with what they started complete."""
        finish(self._device)
        if self._group.size > 1:
            self._group.add(torch.zeros(1))


def _carrier(device: torch.device) -> str:
    """What collectives of tensors on a device go through."""
    if device.type == "cpu":
        return "gloo"
    from torch.cuda import nccl  # noqa: PLC0415 - what is imported here is only there with CUDA

    version: Any = nccl.version()  # type: ignore[no-untyped-call]
    return f"NCCL {'.'.join(str(number) for number in version)}"


def _piece(row: Tensor, offset: int, like: Tensor) -> Tensor:
    """The bytes of a row from `offset` on as numbers of a piece."""
    return row[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def main() -> None:
    """Until the bench is done."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        serve(sock)


if __name__ == "__main__":
    main()
