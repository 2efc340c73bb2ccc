"""What the ranks of one engine say to each other: rank 0 tells, the others hear, and each says whether it is well.

Owns the messages, their encoding, and the rounds in which they go. Knows neither SGLang nor what a rank does with what
it hears.

    rank 0                                    every other rank
    Up ─────────────────────────────────────► SGLang is ready and at rest on all of them
    Begun ──────────────────────────────────► the unit is about to be sampled: they have been told of it, too
    Prefilled, Sampled ─────────────────────► as they come; nothing, twice a second, says that it goes on
    Over ───────────────────────────────────► SGLang is at rest again
    Dropped ────────────────────────────────► nothing is kept that depends on the weights

A round is one collective: all ranks come to it, each with how it is. One that has failed comes once more and says why,
and that ends the line for all: whoever hears of it raises. A rank that is gone ends the round at once, and one that
does not come ends it at a deadline. While it waits a rank looks whether its own part of SGLang is alive.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from rollplex.errors import EngineError, ProtocolError, RollplexError, WaitError
from rollplex.model.parallel.group import TensorGroup
from rollplex.protocol.common import Count
from rollplex_rollout.engine import FinishedGroup, Unit, UnitReport

SILENT_S: Final = 150.0
"""Of a rank in the middle of a unit, which comes to a round twice a second."""
FAILING_S: Final = 5.0
"""How long a rank that has failed waits for the others, to tell them."""
_LOOK_EVERY_S: Final = 0.25
_PAUSE_S: Final = 0.001
_MAX_WORDS: Final = 4000
_FINE, _FAILED = 0, 1

log = logging.getLogger("rollplex.rollout.sglang")


class Up(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Rank 0's engine is made."""


class Begun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Which unit rank 0 has."""

    step: Count
    purpose: str
    groups: tuple[Count, ...]


class Prefilled(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Every prompt has its first token."""


class Sampled(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """A finished group, in the bits that rank 0 announces."""

    group: Count
    lengths: tuple[Count, ...]
    tokens: bytes
    """<i4."""
    logprobs: bytes
    """<f8."""
    stopped: tuple[bool, ...]


class Over(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The unit is sampled: what all ranks report."""

    prefill_end_s: float
    decode_steps: Count
    vision_prompts: Count


class Dropped(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """SGLang's caches are empty on all ranks."""


Said: TypeAlias = Up | Begun | Prefilled | Sampled | Over | Dropped
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(tuple[Said, ...])


def begun(unit: Unit) -> Begun:
    """A unit as it is told of."""
    return Begun(step=unit.step, purpose=unit.sampling.purpose, groups=tuple(slot.group for slot in unit.prompts))


def report(over: Over, start_s: float, kv_bytes: int) -> UnitReport:
    """What a rank reports of a unit; its start and its keys and values are its own."""
    return UnitReport(
        start_s=start_s,
        prefill_end_s=over.prefill_end_s,
        end_s=time.monotonic(),
        decode_steps=over.decode_steps,
        vision_prompts=over.vision_prompts,
        kv_bytes=kv_bytes,
    )


def sampled(group: FinishedGroup) -> Sampled:
    """A group as it is passed on."""
    return Sampled(
        group=group.group,
        lengths=group.lengths,
        tokens=group.tokens.astype("<i4", copy=False).tobytes(),
        logprobs=group.logprobs.astype("<f8", copy=False).tobytes(),
        stopped=group.stopped,
    )


def finished(said: Sampled) -> FinishedGroup:
    """And as it comes out."""
    return FinishedGroup(
        group=said.group,
        lengths=said.lengths,
        tokens=np.frombuffer(said.tokens, "<i4").astype(np.int32),
        logprobs=np.frombuffer(said.logprobs, "<f8").astype(np.float64),
        stopped=said.stopped,
    )


class Line(Protocol):
    """How rank 0 tells the others."""

    @property
    def over(self) -> bool:
        """Whether a rank has failed: what the others do together will not end."""
        ...

    def tell(self, *said: Said) -> None:
        """Pass on; without anything: it goes on.

        Raises:
            WaitError: another rank has failed, is gone, or does not come. What it says itself is the reason then.
            EngineError: the line has ended.
        """
        ...

    def failing(self) -> contextlib.AbstractContextManager[None]:
        """Around what the other ranks must hear of if it raises."""
        ...


class Alone:
    """Of an engine of one rank."""

    @property
    def over(self) -> bool:
        return False

    def tell(self, *_: Said) -> None:
        """Nobody is there to hear it."""

    def failing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Rounds:
    """One rank's end of the line (`Line`, and what the other ranks use).

    Args:
        group: the engine's ranks.
        look: raises if this rank's part of SGLang has ended.
        deadline_s: of a round to which others may come late: they may still be at another instruction.
    """

    def __init__(self, group: TensorGroup, look: Callable[[], None], deadline_s: float) -> None:
        self._group = group
        self._look = look
        self._deadline_s = deadline_s
        self._over = False

    @property
    def over(self) -> bool:
        """See `Line`."""
        return self._over

    def tell(self, *said: Said) -> None:
        """Rank 0's part of a round. See `Line`."""
        meeting = any(isinstance(one, Begun | Up | Dropped) for one in said)
        self._round(_FINE, _ENCODER.encode(said) if said else b"", self._deadline_s if meeting else SILENT_S)

    def hear(self, *, late: bool = False) -> tuple[Said, ...]:
        """Any other rank's part; what rank 0 has told.

        Args:
            late: rank 0 may still be at another instruction.

        Raises:
            WaitError, EngineError: as `tell`; or what `look` raises.
        """
        content = self._round(_FINE, b"", self._deadline_s if late else SILENT_S)
        if not content:
            return ()
        try:
            return _DECODER.decode(content)
        except msgspec.MsgspecError as error:
            raise ProtocolError("The ranks of SGLang's engine do not understand each other", got=str(error)) from error

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """See `Line`. Also around what a rank does with what it has heard."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._over:
            return
        text = f"{type(error).__name__}: {error}"[:_MAX_WORDS]
        try:
            self._round(_FAILED, text.encode(), FAILING_S, watched=False)
        except RollplexError as second:
            log.warning("the other ranks of the engine could not be told: %s", second)
        self._over = True

    def _round(self, state: int, own: bytes, deadline_s: float, *, watched: bool = True) -> bytes:
        """What rank 0 has brought. A trouble of this rank's own SGLang is raised when the round is over, so that the
        next one pairs with the others' next one."""
        if self._over:
            raise EngineError("The ranks of SGLang's engine are apart", needed="a new engine, after a failure")
        trouble = _Trouble(self._look if watched else None, time.monotonic() + deadline_s)
        states = self._gather(torch.tensor([state, len(own)]), trouble)
        failed = [rank for rank, one in enumerate(states) if int(one[0]) == _FAILED and rank != self._group.rank]
        if failed:
            trouble.hurry()  # it may have waited long enough by now
        try:
            contents = self._contents([int(one[1]) for one in states], own, trouble)
        except WaitError:
            if not failed:
                raise
            contents = [b"a failure that it did not stay to tell"] * len(states)
        if failed:
            self._over = True
            raise WaitError(
                "Another rank of SGLang's engine has failed",
                got=contents[failed[0]].decode(errors="replace"),
                where=f"rank {failed[0]}",
            )
        if trouble.error is not None:
            raise trouble.error
        return contents[0]

    def _contents(self, sizes: Sequence[int], own: bytes, trouble: _Trouble) -> list[bytes]:
        """What each rank has brought."""
        if not max(sizes):
            return [b""] * len(sizes)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        if own:
            padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        gathered = self._gather(padded, trouble)
        return [bytes(one[:size].numpy()) for one, size in zip(gathered, sizes, strict=True)]

    def _gather(self, tensor: Tensor, trouble: _Trouble) -> list[Tensor]:
        group = self._group.process_group
        assert group is not None, "a line has two ends"
        parts = [torch.empty_like(tensor) for _ in range(self._group.size)]
        try:
            work = group.allgather([parts], [tensor])
            while not work.is_completed():
                if trouble.late():
                    self._over = True
                    raise trouble.error or WaitError(
                        "A rank of SGLang's engine did not come to a round",
                        needed=f"all {self._group.size} ranks",
                        do="See in the log of their rollout processes what they are at.",
                        where=f"rank {self._group.rank}",
                    )
                time.sleep(_PAUSE_S)
            work.wait()
        except RuntimeError as error:
            self._over = True
            raise trouble.error or WaitError(
                "A rank of SGLang's engine is gone", got=str(error), where=f"seen by rank {self._group.rank}"
            ) from error
        return parts


class _Trouble:
    """What comes up while a rank waits. After a trouble of its own it waits for the others only so long that it can
    tell them."""

    def __init__(self, look: Callable[[], None] | None, end: float) -> None:
        self._look = look
        self._end = end
        self._next = 0.0
        self.error: RollplexError | None = None

    def hurry(self) -> None:
        """Whoever is waited for may not come any more."""
        self._end = min(self._end, time.monotonic() + FAILING_S)

    def late(self) -> bool:
        """Whether the wait is over."""
        now = time.monotonic()
        if self._look is not None and now >= self._next:
            self._next = now + _LOOK_EVERY_S
            try:
                self._look()
            except RollplexError as error:
                self.error, self._look = error, None
                self.hurry()
        return now >= self._end


def expect(said: Sequence[Said], kind: type[Said]) -> None:
    """Raise ProtocolError unless exactly one message of this kind was said."""
    if len(said) != 1 or not isinstance(said[0], kind):
        raise ProtocolError(
            "The ranks of SGLang's engine are not at the same instruction",
            got=", ".join(type(one).__name__ for one in said) or "nothing",
            needed=kind.__name__,
        )
