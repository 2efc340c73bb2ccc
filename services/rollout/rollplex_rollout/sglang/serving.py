"""The scheduler process's end of the connection about the weights.

Owns: taking the segment in, and answering what the rollout process asks about it. Knows no SGLang: `loader` calls it.

    waits for: the next request, without deadline.   unblocked by: a request, or the end of the rollout process.

It is a thread of its own beside SGLang's event loop, so that a header can be read while tokens are decoded. Bytes of a
GPU are copied on a stream of its own and wait for nothing that SGLang has queued: what may be read when is settled by
messages, not by the order of kernels.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollplex.errors import EngineError, ProtocolError, RollplexError, StateError
from rollplex.layout.parameters import ParameterTable, parameter_table
from rollplex.layout.shape import ModelShape, read_shape
from rollplex.memory.digest import digest
from rollplex.memory.segment import Mapping, backend
from rollplex.memory.tensors import require_mapped, tensor
from rollplex.protocol.common import Memory
from rollplex_rollout.sglang import wire
from rollplex_rollout.sglang.aliasing import renew, require_copies
from rollplex_rollout.sglang.places import Places, places

OFFER_DEADLINE_S = 60.0

log = logging.getLogger("rollplex.rollout.sglang")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The weights, mapped into this process."""

    sock: socket.socket
    offer: wire.Offer
    shape: ModelShape
    table: ParameterTable
    places: Places
    mapping: Mapping

    def refuse(self, error: RollplexError) -> None:
        """Tell the rollout process why it cannot go on."""
        wire.tell(self.sock, trouble(error))


def take(path: Path) -> Taken:
    """Connect to the rollout process at `path`, receive the segment and map it.

    Raises:
        StateError: this process disagrees with the rollout process about the parameter table.
        SegmentError: the segment cannot be mapped.
        ProtocolError, WaitError, EOFError: the rollout process does not offer anything.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    wire.tell(sock, wire.Ready(pid=os.getpid()))
    offer, fds = wire.hear_rollout(sock, OFFER_DEADLINE_S)
    try:
        return _taken(sock, offer, fds)
    except RollplexError as error:
        wire.tell(sock, trouble(error))
        sock.close()
        raise
    finally:
        for fd in fds:  # the mapping keeps the memory
            os.close(fd)


def _taken(sock: socket.socket, offer: wire.ToScheduler, fds: tuple[int, ...]) -> Taken:
    if not isinstance(offer, wire.Offer) or len(fds) != 1:
        raise ProtocolError("The weights were not offered first", got=f"{offer} with {len(fds)} descriptors")
    shape = read_shape(Path(offer.path))
    table = parameter_table(shape, dtype=offer.dtype, freeze_vision=offer.freeze_vision)
    if table.hash != offer.table_hash:
        raise StateError(
            "The scheduler process and the rollout process disagree about the parameter table",
            got=table.hash,
            needed=offer.table_hash,
        )
    mapping = backend(offer.memory).map(fds[0], offer.size_bytes)
    rank = places(table, shape, offer.parallel)
    return Taken(sock=sock, offer=offer, shape=shape, table=table, places=rank, mapping=mapping)


class WeightsServer(threading.Thread):
    """Answers about the weights until the rollout process ends."""

    def __init__(
        self, taken: Taken, parameters: Callable[[], dict[str, Tensor]], lend: Callable[[Mapping], None]
    ) -> None:
        """parameters: SGLang's, as they are at the moment of the call. lend: takes a unit's inputs."""
        super().__init__(name="rollplex-weights", daemon=True)
        self._taken = taken
        self._parameters = parameters
        self._lend = lend
        self._reader: Callable[[int, int], bytes] = taken.mapping.read

    def run(self) -> None:
        with self._taken.sock:
            self._serve()

    def _serve(self) -> None:
        if self._taken.offer.memory is Memory.CUDA:
            self._reader = _SideReader(self._taken.mapping).read
        poll = select.poll()
        poll.register(self._taken.sock, select.POLLIN)
        while True:
            poll.poll()  # without deadline on purpose: see above
            try:
                message, fds = wire.hear_rollout(self._taken.sock, OFFER_DEADLINE_S)
            except EOFError:
                return  # the rollout process has ended, and this one ends with it
            answer = self._answer(message, fds)
            for fd in fds:  # a mapping keeps the memory
                os.close(fd)
            wire.tell(self._taken.sock, answer)

    def _answer(self, message: wire.ToScheduler, fds: tuple[int, ...]) -> wire.FromScheduler:
        mapping = self._taken.mapping
        try:
            match message:
                case wire.ReadBytes(offset=offset, size_bytes=size_bytes):
                    return wire.Bytes(content=self._reader(offset, size_bytes))
                case wire.LoadWord(offset=offset):
                    return wire.Word(value=self._word(offset))
                case wire.Digest():
                    return wire.Text(value=digest(mapping, self._taken.table, self._taken.places.total_bytes))
                case wire.Look():
                    self._look()
                case wire.Copy():
                    renew(self._parameters(), mapping, self._taken.places)
                case wire.Inputs(size_bytes=size_bytes):
                    self._lend(backend(Memory.HOST).map(_only(fds), size_bytes))
                case wire.Offer():
                    raise ProtocolError("The weights were offered twice")
        except RollplexError as error:
            return trouble(error)
        except Exception as error:
            # Outer loop of the thread: without an answer the other end would take this process for dead.
            log.exception("%s about the weights cannot be answered", type(message).__name__)
            return trouble(
                EngineError(
                    "SGLang's scheduler process could not answer about the weights",
                    got=f"{type(message).__name__}: {type(error).__name__}: {error}",
                    do="Look at the log of the rollout process; if memory is short, lower rollout.sglang.kv_tokens.",
                )
            )
        return wire.Fine()

    def _look(self) -> None:
        if self._taken.offer.own_weights:
            require_copies(self._parameters(), self._taken.mapping, self._taken.places)
        else:
            require_mapped(self._taken.mapping, self._parameters())

    def _word(self, offset: int) -> int:
        if self._taken.offer.memory is Memory.HOST:
            return self._taken.mapping.load_word(offset)
        return int.from_bytes(self._reader(offset, 8), "little")


def _only(fds: tuple[int, ...]) -> int:
    if len(fds) != 1:
        raise ProtocolError("A unit's inputs came without their descriptor", got=f"{len(fds)}", needed="1")
    return fds[0]


class _SideReader:
    """Copies of device memory on a stream of their own."""

    def __init__(self, mapping: Mapping) -> None:
        self._content = tensor(mapping, 0, (mapping.size_bytes,), torch.uint8)
        self._stream: Any = torch.cuda.Stream(self._content.device)  # type: ignore[no-untyped-call]

    def read(self, offset: int, size_bytes: int) -> bytes:
        part = self._content[offset : offset + size_bytes]
        assert part.numel() == size_bytes, f"{size_bytes} bytes at {offset} of {self._content.numel()}"
        with torch.cuda.stream(self._stream):
            host = part.cpu()
        self._stream.synchronize()
        return host.numpy().tobytes()


def trouble(error: RollplexError) -> wire.Trouble:
    """An error as it crosses to the rollout process."""
    return wire.Trouble(kind=type(error).__name__, what=error.what, got=error.got, needed=error.needed, do=error.do)
