"""The rollout process's end of the connection about the weights.

Owns: handing the segment to SGLang's scheduler process, and reading through it. For weights in the memory of a GPU this
process would need a CUDA context (half a gigabyte) to read the header itself; the scheduler process has one.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from rollplex import errors
from rollplex.errors import EngineError, RollplexError, SegmentError, WaitError
from rollplex.protocol.common import Memory
from rollplex.protocol.rundir import MAX_SOCKET_PATH_BYTES
from rollplex_rollout.sglang import wire

ANSWER_DEADLINE_S: Final = 30.0
DIGEST_DEADLINE_S: Final = 600.0
COPY_DEADLINE_S: Final = 120.0
_LOOK_EVERY_S: Final = 0.5
_MOST_BYTES: Final = 2**20
"""Of one read; headers are a page."""


class Door:
    """Where the scheduler process comes to fetch the weights: a socket in a folder that is closed to others."""

    def __init__(self, path: Path) -> None:
        """Listen at `path`.

        Raises:
            EngineError: the path is too long for a socket.
        """
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise EngineError(
                "SGLang's folder in the run directory has too long a path for a unix socket",
                got=str(path),
                needed=f"at most {MAX_SOCKET_PATH_BYTES} bytes",
                do="Choose a run directory with a shorter path.",
            )
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(str(path))
        self._sock.listen(1)

    def wait(self, deadline_s: float, look: Callable[[], None]) -> RemoteWeights:
        """The connection of the one scheduler process that comes.

        Args:
            look: called every half second; raises if nobody will come any more.

        Raises:
            WaitError: nobody has come by the deadline.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        end = time.monotonic() + deadline_s
        while not poll.poll(ceil(_LOOK_EVERY_S * 1000)):
            look()
            if time.monotonic() >= end:
                raise WaitError(
                    "SGLang's scheduler process did not come for the weights",
                    got=f"nobody within {deadline_s:.0f} s",
                    do="Look at the messages of SGLang in the log of the rollout process.",
                )
        accepted, _ = self._sock.accept()
        return RemoteWeights(accepted)

    def close(self) -> None:
        """Nobody else may come."""
        self._sock.close()
        self.path.unlink(missing_ok=True)


class RemoteWeights:
    """The connection to the scheduler process. Used by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def offer(self, offer: wire.Offer, fd: int, deadline_s: float) -> dict[str, int]:
        """Hand over the segment.

        Returns:
            Where the loader put every parameter: its offset in the segment.

        Raises:
            RollplexError: of the kind and with the parts that the loader raised.
            EngineError: the scheduler process has ended.
            WaitError: no answer by the deadline.
        """
        with _ended():
            hello = wire.hear_scheduler(self._sock, ANSWER_DEADLINE_S)
            if not isinstance(hello, wire.Ready):
                raise _unexpected(hello)
            wire.tell(self._sock, offer, (fd,))
            answer = wire.hear_scheduler(self._sock, deadline_s)
        match answer:
            case wire.Mapped(offsets=offsets):
                return offsets
            case _:
                raise _unexpected(answer)

    def ask(
        self, message: wire.ToScheduler, deadline_s: float = ANSWER_DEADLINE_S, fds: tuple[int, ...] = ()
    ) -> wire.FromScheduler:
        """One question and its answer.

        Raises:
            As `offer`.
        """
        with _ended():
            wire.tell(self._sock, message, fds)
            answer = wire.hear_scheduler(self._sock, deadline_s)
        if isinstance(answer, wire.Trouble):
            raise _unexpected(answer)
        return answer

    def digest(self) -> str:
        """Of the weights, computed over there. Raises as `ask`."""
        match answer := self.ask(wire.Digest(), DIGEST_DEADLINE_S):
            case wire.Text(value=value):
                return value
            case _:
                raise _unexpected(answer)

    def look(self) -> None:
        """Whether every parameter still lies in the segment. Raises as `ask`: SegmentError if not."""
        self._agree(wire.Look())

    def copy(self) -> None:
        """Renew the copies of an engine with weights of its own. Raises as `ask`."""
        self._agree(wire.Copy())

    def lend_inputs(self, fd: int, size_bytes: int) -> None:
        """Hand over the segment with a unit's pictures; given back when the scheduler rests. Raises as `ask`."""
        self._agree(wire.Inputs(size_bytes=size_bytes), (fd,))

    def _agree(self, message: wire.ToScheduler, fds: tuple[int, ...] = ()) -> None:
        answer = self.ask(message, COPY_DEADLINE_S, fds)
        if not isinstance(answer, wire.Fine):
            raise _unexpected(answer)

    def close(self) -> None:
        self._sock.close()


class RemoteMapping:
    """The segment as it can be read through the scheduler process (`rollplex.memory.segment.Mapping`): small reads, no
    views, no writes."""

    def __init__(self, remote: RemoteWeights, size_bytes: int, memory: Memory) -> None:
        self._remote = remote
        self._size_bytes = size_bytes
        self._closed = False
        self.memory = memory

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def buffer(self) -> memoryview:
        _only_read("all bytes")

    def view(self, offset: int, size_bytes: int) -> memoryview:
        _only_read(f"{size_bytes} bytes at {offset}")

    def device_view(self, offset: int, size_bytes: int) -> Any:
        _only_read(f"{size_bytes} bytes at {offset}")

    def read(self, offset: int, size_bytes: int) -> bytes:
        self._check(offset, size_bytes)
        match answer := self._remote.ask(wire.ReadBytes(offset=offset, size_bytes=size_bytes)):
            case wire.Bytes(content=content) if len(content) == size_bytes:
                return content
            case _:
                raise _unexpected(answer)

    def write(self, offset: int, content: bytes) -> None:
        _only_read(f"a write of {len(content)} bytes at {offset}")

    def load_word(self, offset: int) -> int:
        self._check(offset, 8, multiple=8)
        match answer := self._remote.ask(wire.LoadWord(offset=offset)):
            case wire.Word(value=value):
                return value
            case _:
                raise _unexpected(answer)

    def store_word(self, offset: int, value: int) -> None:
        _only_read(f"a store of {value} at {offset}")

    def clear(self) -> None:
        _only_read("a store of zeros")

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, offset: int, size_bytes: int, multiple: int = 1) -> None:
        if self._closed:
            raise SegmentError("A segment is used after it was unmapped", got="closed mapping", needed="open mapping")
        if offset < 0 or not 0 <= size_bytes <= _MOST_BYTES or offset + size_bytes > self._size_bytes:
            raise SegmentError(
                "An access lies outside its segment, or is too large to go through another process",
                got=f"{size_bytes} bytes at {offset}",
                needed=f"at most {_MOST_BYTES} bytes within {self._size_bytes}",
            )
        if offset % multiple:
            raise SegmentError("A word is not aligned", got=f"offset {offset}", needed=f"a multiple of {multiple}")


class _ended:  # noqa: N801 - a context manager, used as a function
    """Says who has ended."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, EOFError):
            raise EngineError(
                "SGLang's scheduler process has ended",
                got="the end of its connection about the weights",
                do="Look at the messages of SGLang in the log of the rollout process.",
            ) from error


def _unexpected(answer: wire.FromScheduler) -> RollplexError:
    if not isinstance(answer, wire.Trouble):
        return EngineError("SGLang's scheduler process gave another answer than asked for", got=f"{answer}")
    kind = getattr(errors, answer.kind, EngineError)
    known: type[RollplexError] = kind if isinstance(kind, type) and issubclass(kind, RollplexError) else EngineError
    return known(answer.what, got=answer.got, needed=answer.needed, do=answer.do, where="SGLang's scheduler process")


def _only_read(got: str) -> NoReturn:
    raise SegmentError(
        "Weights that another process has mapped can only be read, a little at a time", got=got, needed="read"
    )
