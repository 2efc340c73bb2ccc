"""What the gate says: instructions to trainer, readers and journal. Values only.

Each carries `cause`: the number of the event, within the gate, that led to it. The gate's story shows the same numbers.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct


class Prepare(Struct, frozen=True, kw_only=True):
    """Trainer: sum, normalise, clip, look for non-finite values, vote; the weights stay. Event: `voted`."""

    cause: int
    step: int
    version: int


class DrainReader(Struct, frozen=True, kw_only=True):
    """Reader: finish what reads the weights and read them no more. Event: `reader_drained`."""

    cause: int
    reader: str
    version: int


class JournalBegin(Struct, frozen=True, kw_only=True):
    """Journal: BEGIN of the update from `version`, on disk. Event: `begun_durable`."""

    cause: int
    step: int
    version: int


class Apply(Struct, frozen=True, kw_only=True):
    """Trainer: step in place from `version`, publish version + 1 last. Event: `applied`."""

    cause: int
    step: int
    version: int


class JournalCommit(Struct, frozen=True, kw_only=True):
    """Journal: COMMIT, the weights are at `version` with this digest, on disk. Event: `committed_durable`."""

    cause: int
    step: int
    version: int
    digest: str


class Skip(Struct, frozen=True, kw_only=True):
    """Trainer: drop the step's gradients; the version stays. Event: `skipped`."""

    cause: int
    step: int


class TellReader(Struct, frozen=True, kw_only=True):
    """Reader: the weights are at `version`; drop what depends on others. Event: `caches_dropped`."""

    cause: int
    reader: str
    version: int


class Opened(Struct, frozen=True, kw_only=True):
    """The weights may be read again; the step is over. `updated`: whether it moved the weights."""

    cause: int
    step: int
    version: int
    updated: bool


GateStep: TypeAlias = Prepare | DrainReader | JournalBegin | Apply | JournalCommit | Skip | TellReader | Opened
