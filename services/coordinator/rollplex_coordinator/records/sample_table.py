"""A table of samples: a few groups of one step with what the model saw, answered, got and was taught by.

Owns its form, for who writes tables and who reads them back. Knows nothing of files (`sample_files`), nor of how it
looks (`sample_page`, `sample_summary`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rollplex.protocol.inputs import RowShown, Thumbnail
from rollplex_coordinator.records.completions import Completion


class SampleResponse(Struct, frozen=True, kw_only=True):
    """One response of a group; a number that was not given is None."""

    sample: int
    completion: str
    reward: float | None
    rewards: dict[str, float | None]
    """By function."""
    advantage: float | None = None
    tokens: int
    stopped: bool
    """It ended by itself, not by its length."""


class SampleGroup(Struct, frozen=True, kw_only=True):
    """One prompt and its responses."""

    group: int
    row: int
    prompt: str = ""
    media: tuple[Thumbnail, ...] = ()
    left_out: int = 0
    """Media of the row beyond these."""
    missing: str = ""
    """Why prompt and media are not here."""
    skipped: str = ""
    """Why there are no rewards, so no responses here."""
    responses: tuple[SampleResponse, ...] = ()


class SampleTable(Struct, frozen=True, kw_only=True):
    """Samples of one step, taken at one version of the weights."""

    step: int
    version: int
    functions: tuple[str, ...]
    """Names of the reward functions."""
    groups: tuple[SampleGroup, ...]
    shown: bool = False
    """Whether the input process has told what the rows look like."""


NOT_YET = "the input process has not answered yet"


def table_of(
    *,
    step: int,
    version: int,
    rows: Sequence[int],
    functions: Sequence[str],
    completions: Iterable[Completion],
    skipped: Mapping[int, str],
) -> SampleTable:
    """The table without what the rows look like (`with_rows` adds that).

    Args:
        rows: of the groups 0, 1, …
        completions: of these groups; others are left out.
        skipped: why a group has no rewards.
    """
    by_group: dict[int, list[Completion]] = {group: [] for group in range(len(rows))}
    for completion in completions:
        if completion.group in by_group:
            by_group[completion.group].append(completion)
    groups = tuple(
        SampleGroup(
            group=group,
            row=row,
            missing=NOT_YET,
            skipped=skipped.get(group, ""),
            responses=tuple(map(_response, by_group[group])),
        )
        for group, row in enumerate(rows)
    )
    return SampleTable(step=step, version=version, functions=tuple(functions), groups=groups)


def with_rows(table: SampleTable, shown: Iterable[RowShown]) -> SampleTable:
    """The table with prompts and media."""
    known = {row.row: row for row in shown}
    groups = tuple(_with_row(group, known[group.row]) if group.row in known else group for group in table.groups)
    return replace(table, groups=groups, shown=True)


def _response(completion: Completion) -> SampleResponse:
    return SampleResponse(
        sample=completion.sample,
        completion=completion.completion,
        reward=_given(completion.reward),
        rewards={name: _given(reward) for name, reward in completion.rewards.items()},
        advantage=_given(completion.advantage),
        tokens=completion.tokens,
        stopped=completion.stopped,
    )


def _given(value: float) -> float | None:
    return None if math.isnan(value) else value


def _with_row(group: SampleGroup, row: RowShown) -> SampleGroup:
    return replace(group, prompt=row.prompt, media=row.media, left_out=row.left_out, missing=row.problem)
