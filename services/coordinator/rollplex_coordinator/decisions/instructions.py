"""What a step's schedule can ask for: the modes, and one struct per instruction.

Knows nothing of when each is given out (`schedule`) or how it is carried out.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from rollplex.journal.phases import Phase
from rollplex.protocol.prefix import Which


class Mode(StrEnum):
    """The three schedules of design section 5."""

    SERIAL = "serial"
    OVERLAP = "overlap"
    STREAM = "stream"


class Generate(Struct, frozen=True, kw_only=True):
    """Rollout: sample decode unit `unit`."""

    unit: int


class Ask(Struct, frozen=True, kw_only=True):
    """Ledger: memory for a prefix unit; answer with `granted`, now or later."""

    which: Which
    unit: int


class Forward(Struct, frozen=True, kw_only=True):
    """Prefix: forward pass of a prefix unit whose memory is granted."""

    which: Which
    unit: int


class Reward(Struct, frozen=True, kw_only=True):
    """Reward child: score a finished group."""

    group: int


class Score(Struct, frozen=True, kw_only=True):
    """Prefix: reference log-probabilities of suffix unit `unit`; `release` after the last one of its prefix unit."""

    unit: int
    release: bool


class Train(Struct, frozen=True, kw_only=True):
    """Trainer: forward and backward of suffix unit `unit`."""

    unit: int
    first: bool
    release: bool


class Backward(Struct, frozen=True, kw_only=True):
    """Prefix: backward of prefix unit `unit`; all its suffix units are trained."""

    unit: int


class Release(Struct, frozen=True, kw_only=True):
    """Ledger: the memory of a prefix unit comes back."""

    which: Which
    unit: int


class Enter(Struct, frozen=True, kw_only=True):
    """The step enters a phase."""

    phase: Phase


class Complete(Struct, frozen=True, kw_only=True):
    """Every group is trained and every prefix backward done: over to the gate."""


Instruction: TypeAlias = Generate | Ask | Forward | Reward | Score | Train | Backward | Release | Enter | Complete
