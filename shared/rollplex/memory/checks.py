"""What every kind of memory refuses in the same words.

Owns: the bounds of requests and accesses. Does not know: memory.
"""

from __future__ import annotations

from typing import Final

from rollplex.errors import SegmentError

_MAX_NAME_BYTES: Final = 200


def check_request(size_bytes: int, name: str) -> None:
    """Whether a segment could be asked for like this.

    Raises:
        SegmentError: it could not.
    """
    if not 1 <= size_bytes < 2**53:
        raise SegmentError("A segment cannot have this size", got=f"{size_bytes} bytes", needed="1 byte or more")
    if not name or "\0" in name or len(name.encode()) > _MAX_NAME_BYTES:
        raise SegmentError("A segment cannot have this name", got=repr(name), needed=f"1 to {_MAX_NAME_BYTES} bytes")


def check_access(closed: bool, total_bytes: int, offset: int, size_bytes: int, multiple: int) -> None:
    """Whether `size_bytes` at `offset`, a multiple of `multiple`, lie in an open mapping of `total_bytes`.

    Raises:
        SegmentError: they do not.
    """
    if closed:
        raise SegmentError("A segment is used after it was unmapped", got="closed mapping", needed="open mapping")
    if offset < 0 or size_bytes < 0 or offset + size_bytes > total_bytes:
        raise SegmentError(
            "An access lies outside its segment",
            got=f"{size_bytes} bytes at {offset}",
            needed=f"within {total_bytes} bytes",
        )
    if offset % multiple:
        raise SegmentError("A word is not aligned", got=f"offset {offset}", needed=f"a multiple of {multiple}")
