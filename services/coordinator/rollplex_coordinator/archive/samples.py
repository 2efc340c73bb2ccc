"""Samples of a run, searched: tables of RUN/samples by step, row of the dataset and reward, with their pictures.

Owns how much is read for one answer: it goes from the newest table back, and says where to go on. File names are made
of whole numbers alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rollplex.errors import JournalError
from rollplex_coordinator.records.sample_files import FOLDER
from rollplex_coordinator.records.sample_table import SampleGroup, SampleTable

MAX_TABLE_BYTES = 64 * 2**20
MAX_READ_BYTES = 64 * 2**20
"""Of tables, for one answer."""
MAX_TABLES = 200
"""Looked through for one answer."""
_NAME = re.compile(r"step_([0-9]{1,9})\.json")
_PNG = b"\x89PNG\r\n\x1a\n"


_DECODER = msgspec.json.Decoder(SampleTable)


class Wanted(Struct, frozen=True, kw_only=True):
    """What is searched for; None: whatever it is."""

    row: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    step_from: int = 0
    step_to: int | None = None

    @property
    def by_reward(self) -> bool:
        """Whether responses without a reward are out."""
        return self.reward_from is not None or self.reward_to is not None


class Hit(Struct, frozen=True, kw_only=True):
    """A group of a table, with those of its responses that are wanted."""

    step: int
    version: int
    group: SampleGroup


class Page(Struct, frozen=True, kw_only=True):
    """One answer."""

    hits: list[Hit]
    looked_at: int
    """Tables."""
    tables: int
    """That the run has, of any step."""
    next_step_to: int | None
    """Search on with this `step_to`; None: this was all."""


def search(folder: Path, wanted: Wanted, *, limit: int) -> Page:
    """Samples, the newest first, whole tables at a time.

    Args:
        limit: stop after the table that brought it to so many groups.

    Raises:
        JournalError: a table cannot be read.
    """
    steps = _steps(folder)
    inside = [s for s in steps if s >= wanted.step_from and (wanted.step_to is None or s <= wanted.step_to)]
    hits: list[Hit] = []
    looked = size = 0
    for step in inside:
        if len(hits) >= limit or looked >= MAX_TABLES or size >= MAX_READ_BYTES:
            return Page(hits=hits, looked_at=looked, tables=len(steps), next_step_to=step)
        raw = _read(folder, step)
        size += len(raw)
        looked += 1
        table = _decode(raw, folder, step)
        hits += [Hit(step=table.step, version=table.version, group=group) for group in _matching(table, wanted)]
    return Page(hits=hits, looked_at=looked, tables=len(steps), next_step_to=None)


def picture(folder: Path, step: int, group: int, index: int) -> bytes | None:
    """A PNG of a table; None: there is no such picture.

    Raises:
        JournalError: the table cannot be read.
    """
    if step not in _steps(folder):
        return None
    table = _decode(_read(folder, step), folder, step)
    media = next((item.media for item in table.groups if item.group == group), ())
    png = media[index].png if index < len(media) else b""
    return png if png.startswith(_PNG) else None


def _matching(table: SampleTable, wanted: Wanted) -> Iterator[SampleGroup]:
    for group in table.groups:
        if wanted.row is not None and group.row != wanted.row:
            continue
        kept = tuple(item for item in group.responses if _in_range(item.reward, wanted))
        if kept or not wanted.by_reward:
            yield replace(group, responses=kept)


def _in_range(reward: float | None, wanted: Wanted) -> bool:
    """A response without a reward is in no range."""
    if reward is None:
        return not wanted.by_reward
    low = wanted.reward_from is None or reward >= wanted.reward_from
    high = wanted.reward_to is None or reward <= wanted.reward_to
    return low and high


def _steps(folder: Path) -> list[int]:
    """Steps that have a table, newest first."""
    samples = folder / FOLDER
    if samples.is_symlink() or not samples.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in samples.iterdir() if not path.is_symlink())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _read(folder: Path, step: int) -> bytes:
    path = folder / FOLDER / f"step_{step}.json"
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise JournalError("a table of samples cannot be read", got=str(error), where=str(path)) from error
    if len(raw) > MAX_TABLE_BYTES:
        raise JournalError(
            "a table of samples is too large to be shown",
            got=f"more than {MAX_TABLE_BYTES} bytes",
            needed="fewer or smaller responses",
            do="Open the page beside it in a browser instead.",
            where=str(path),
        )
    return raw


def _decode(raw: bytes, folder: Path, step: int) -> SampleTable:
    try:
        return _DECODER.decode(raw)
    except msgspec.DecodeError as error:
        where = str(folder / FOLDER / f"step_{step}.json")
        raise JournalError("a table of samples is not what this version writes", got=str(error), where=where) from error
