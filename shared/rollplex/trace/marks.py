"""What a trace consists of, before any file format: marks on named tracks, samples of amounts, arrows.

Values only. Times are nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct, field

ITERATIONS = "iterations"
PHASES = "phases"
REWARDS = "rewards"
UPDATES = "update"
SAVES = "checkpoints and evaluations"
EVENTS = "events"
STARTUP = "start"
WAITS = "requests that wait for memory"
"""Tracks of the node. A service's track has the service's own name, like "prefix[0:0]"."""

Value: TypeAlias = str | int | float
Args: TypeAlias = tuple[tuple[str, Value], ...]

OPEN: tuple[str, str] = ("open", "the trace ends before this does")
"""The argument of a mark that had not ended."""


class Mark(Struct, frozen=True, kw_only=True, gc=False):
    """Something that took time on a track, or (`end_ns` None) happened at one moment."""

    track: str
    name: str
    kind: str
    """What sort of thing, without numbers: a unit's kind, "decode", "phase", "reward", …"""
    start_ns: int
    end_ns: int | None = None
    args: Args = ()

    @property
    def seconds(self) -> float:
        """How long it took; 0 for a moment."""
        return 0.0 if self.end_ns is None else (self.end_ns - self.start_ns) / 1e9


class Sample(Struct, frozen=True, kw_only=True, gc=False):
    """Bytes leased from `at_ns` on."""

    device: str
    kind: str
    at_ns: int
    size_bytes: int


class Chapter(Struct, kw_only=True):
    """One iteration, from its start to the next one's; or (`step` None) what came before the first."""

    step: int | None = None
    done: bool = False
    """Its IterationDone is in the journal."""
    marks: list[Mark] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    arrows: list[tuple[Mark, ...]] = field(default_factory=list)
    """Each leads from its first mark through the others to its last."""

    def of(self, kind: str) -> list[Mark]:
        """Its marks of one kind."""
        return [mark for mark in self.marks if mark.kind == kind]


def ns(seconds: float) -> int:
    """Seconds of CLOCK_MONOTONIC as nanoseconds."""
    return round(seconds * 1e9)


def role_of(track: str) -> str:
    """The role in a service's name: "prefix" for "prefix[0:0]"; other tracks have themselves."""
    return track.partition("[")[0]
