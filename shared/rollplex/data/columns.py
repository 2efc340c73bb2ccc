"""Which keys of a row are columns. Pure; imports nothing, so that the process of the reward functions stays small."""

from __future__ import annotations

from collections.abc import Mapping

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""As in TRL: not passed to reward functions as columns."""


def columns_of(row: Mapping[str, object]) -> dict[str, object]:
    """What a row has beside its prompt."""
    return {name: value for name, value in row.items() if name not in NOT_COLUMNS}
