"""What the reward child and the process of the user's functions say to each other.

Frames on a socket pair: four bytes of length (little-endian), then msgpack. The child asks, the runner answers; while
it scores, it says which function it enters, so that the child knows what hangs. No pickle; typed both ways.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from rollplex.protocol.reward import Form, RequiredColumns, RewardProblem

MAX_FRAME_BYTES = 256 * 2**20
LENGTH_BYTES = 4
Index = Annotated[int, Meta(ge=0, lt=64)]


class Function(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One function, as the configuration names it."""

    spec: str
    form: Form = Form.AUTO
    options: dict[str, object] = {}
    """Keyword arguments of every call; JSON values."""


# child -> runner, first: limit yourself, then import the functions. Answer: Ready or Unusable.
class Prepare(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    functions: tuple[Function, ...]
    memory_limit_bytes: int
    """RLIMIT_AS; 0 is off."""


class File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An encoded image that the row holds itself."""

    data: bytes
    name: str
    """For errors."""


class Images(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The images of a row, for functions that want them decoded."""

    folder: str
    places: tuple[str | File, ...]
    """Paths relative to the folder, or files."""
    max_pixels: int
    """Of one image."""


# child -> runner: score one group. Answer: for each function Entered, then Returned; at the first that fails, Broke.
class Score(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    row: bytes
    """The row's line, JSON."""
    texts: tuple[str, ...]
    lengths: tuple[int, ...]
    tokens: bytes
    """int32 of all samples, one after the other."""
    stopped: tuple[bool, ...]
    step: int = 0
    source: str = ""
    images: Images | None = None


# runner -> child: the functions are imported.
class Ready(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    taken: tuple[str, ...]
    """Per function in words: as whose it is taken, and why."""
    images: bool
    """A function wants decoded images."""
    fingerprints: tuple[str, ...]
    """Of each function's source file, in their order."""
    required: tuple[RequiredColumns, ...]
    """Likewise."""


# runner -> child: a function cannot be imported or called; parts of a RewardError.
class Unusable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    what: str
    got: str
    needed: str
    do: str
    where: str


# runner -> child
class Entered(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    function: Index


# runner -> child
class Returned(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    function: Index
    values: list[float | None]
    parts: dict[str, list[float]]
    """Other numbers that the function reports, by name."""


# runner -> child
class Broke(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    function: Index
    problem: RewardProblem
    detail: str


ToRunner: TypeAlias = Prepare | Score
FromRunner: TypeAlias = Ready | Unusable | Entered | Returned | Broke

TO_RUNNER: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)
FROM_RUNNER: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)
_ENCODER = msgspec.msgpack.Encoder()


def frame(message: ToRunner | FromRunner) -> bytes:
    """A message with its length in front."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
