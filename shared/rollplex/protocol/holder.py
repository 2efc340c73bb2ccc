"""The stream that passes segments: one AF_UNIX SOCK_STREAM per worker, framed by `rollplex.memory.fds`.

The worker speaks first: a hello (`rollplex.protocol.handshake`), answered by a welcome or a refusal; after that one
Fetch at a time, each with one answer. The stream stays open for the worker's life: its end of file tells each side of
the other's death.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from rollplex.protocol.common import Count, Kind, Memory, Name


# worker -> coordinator: send the descriptor of this segment. Answer: Descriptor or NoSuchSegment.
class Fetch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    segment: Count


# coordinator -> worker, with exactly one file descriptor attached. Verify the size (and on hosts the seals) before
# mapping; close the descriptor when the segment's lease ends, not earlier.
class Descriptor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    segment: Count
    kind: Kind
    size_bytes: Count
    memory: Memory = Memory.HOST


# coordinator -> worker, without a file descriptor: the segment does not exist, has ended, or is not for this role.
class NoSuchSegment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    segment: Count
    why: Name


ToHolder: TypeAlias = Fetch
FromHolder: TypeAlias = Descriptor | NoSuchSegment
