"""Frames with file descriptors over a unix stream socket.

Owns: framing, deadlines, and that no descriptor is ever lost: `recv` returns all that arrived, or closes them and
raises. Does not know: what payloads and descriptors mean, who the peer is.

    frame = "RXFD" | payload bytes: uint32 | descriptors: uint32 | payload        little-endian
    The descriptors travel as SCM_RIGHTS with the first byte.

After any error the stream may stand in the middle of a frame: close it.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from math import ceil
from typing import Final

from rollplex.errors import ProtocolError, SegmentError, WaitError

MAX_FDS: Final = 253
"""What Linux carries with one message (SCM_MAX_FD)."""
_MAGIC: Final = b"RXFD"
_HEAD: Final = struct.Struct("<4sII")
_CHUNK_BYTES: Final = 2**16


def send(sock: socket.socket, payload: bytes, fds: Sequence[int], deadline_s: float) -> None:
    """Send one frame. The descriptors stay the caller's.

    Args:
        sock: AF_UNIX, SOCK_STREAM; blocking or non-blocking, but without a time-out of its own. One thread sends at a
            time (another may receive).
        payload: less than 4 GiB.
        fds: at most MAX_FDS.
        deadline_s: seconds from now within which the whole frame must be in the socket.

    Raises:
        EOFError: the peer has closed.
        WaitError: the peer does not read.
        SegmentError: a descriptor that is not open, or too many.
    """
    _require_plain(sock)
    if len(fds) > MAX_FDS:
        raise SegmentError("A frame has too many descriptors", got=str(len(fds)), needed=f"at most {MAX_FDS}")
    clock = _Deadline(sock, deadline_s, "room to send a frame")
    rest = memoryview(_HEAD.pack(_MAGIC, len(payload), len(fds)) + payload)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    while rest:
        try:
            sent = sock.sendmsg([rest], rights, socket.MSG_DONTWAIT)
        except BlockingIOError:
            clock.wait(select.POLLOUT)
            continue
        except OSError as error:
            raise _send_error(error) from error
        rest = rest[sent:]
        rights = []


def recv(sock: socket.socket, deadline_s: float, max_bytes: int, max_fds: int) -> tuple[bytes, tuple[int, ...]]:
    """Receive one frame: its payload, and its descriptors (close-on-exec), which are the caller's from here on.

    Args:
        sock: as for `send`; one thread receives at a time.
        deadline_s: seconds from now within which the whole frame must have arrived.
        max_bytes: longest payload to take; a longer one is refused before any of it is read.
        max_fds: most descriptors to take.

    Raises:
        EOFError: the peer has closed, and no frame had begun.
        ProtocolError: not a frame, cut off, too long, or with other descriptors than it says.
        WaitError: no whole frame by the deadline.
    """
    _require_plain(sock)
    reader = _Reader(sock, _Deadline(sock, deadline_s, "a frame"), max_fds)
    try:
        head = reader.exactly(_HEAD.size, may_end=True)
        magic, num_bytes, num_fds = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise ProtocolError("A frame does not begin like one", got=repr(magic), needed=repr(_MAGIC))
        if num_bytes > max_bytes:
            raise ProtocolError("A frame is too long", got=f"{num_bytes} bytes", needed=f"at most {max_bytes}")
        if num_fds > max_fds:
            raise ProtocolError("A frame has too many descriptors", got=str(num_fds), needed=f"at most {max_fds}")
        if len(reader.fds) != num_fds:
            raise ProtocolError(
                "A frame has other descriptors than it says", got=str(len(reader.fds)), needed=str(num_fds)
            )
        reader.max_fds = num_fds  # none may come with the payload
        payload = reader.exactly(num_bytes)
    except BaseException:
        reader.close_fds()
        raise
    return payload, tuple(reader.fds)


class _Deadline:
    def __init__(self, sock: socket.socket, deadline_s: float, awaited: str) -> None:
        self._sock = sock
        self._end_s = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._awaited = awaited

    def wait(self, event: int) -> None:
        """Until the socket is ready (or broken). Raises WaitError."""
        poll = select.poll()
        poll.register(self._sock, event)
        left_s = self._end_s - time.monotonic()
        if left_s <= 0 or not poll.poll(ceil(left_s * 1000)):
            raise WaitError(
                "A peer on a descriptor stream does not keep up",
                got=f"nothing within {self._deadline_s} s",
                needed=self._awaited,
                where=f"socket {self._sock.fileno()}",
            )


class _Reader:
    """Reads bytes of one frame and keeps every descriptor that comes with them."""

    def __init__(self, sock: socket.socket, clock: _Deadline, max_fds: int) -> None:
        self._sock = sock
        self._clock = clock
        self.max_fds = max_fds
        self.fds: list[int] = []

    def exactly(self, num_bytes: int, *, may_end: bool = False) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            part = self._some(min(num_bytes - len(content), _CHUNK_BYTES))
            if not part:
                if may_end and not content and not self.fds:
                    raise EOFError("the peer has closed the stream")
                raise ProtocolError(
                    "A frame is cut off", got=f"{len(content)} bytes and the end", needed=f"{num_bytes} bytes"
                )
            content += part
        return bytes(content)

    def close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def _some(self, num_bytes: int) -> bytes:
        room = self.max_fds - len(self.fds)
        space = socket.CMSG_SPACE(room * array.array("i").itemsize) if room else 0
        while True:
            try:
                part, ancillary, flags, _ = self._sock.recvmsg(
                    num_bytes, space, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                self._clock.wait(select.POLLIN)
                continue
            except ConnectionError:
                return b""
            break
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self.fds += fds
        if flags & socket.MSG_CTRUNC or len(self.fds) > self.max_fds:
            raise ProtocolError(
                "A frame brings descriptors that cannot be taken",
                got=f"more than {len(self.fds)}" if flags & socket.MSG_CTRUNC else str(len(self.fds)),
                needed=f"at most {self.max_fds}, and room for them (ulimit -n)",
            )
        return part


def _require_plain(sock: socket.socket) -> None:
    assert sock.gettimeout() in (None, 0.0), "a time-out of the socket would be added to the deadline"


def _send_error(error: OSError) -> Exception:
    if isinstance(error, ConnectionError):
        return EOFError("the peer has closed the stream")
    what = "A descriptor is not open" if error.errno == errno.EBADF else "A frame cannot be sent"
    return SegmentError(what, got=str(error.strerror), needed="open descriptors and a connected stream")
