"""Which keys of a row are columns, and which has the right answer. Pure; imports nothing, so that the process of the
reward functions stays small."""

from __future__ import annotations

from collections.abc import Mapping

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""As in TRL: not passed to reward functions as columns."""
ANSWER_COLUMNS = ("ground_truth", "answer", "solution")
"""Where the right answer is, in this order; before all of them reward_model.ground_truth, verl's place."""
ANSWER_PLACES = f"reward_model.ground_truth, or one of {', '.join(ANSWER_COLUMNS)}"


def columns_of(row: Mapping[str, object]) -> dict[str, object]:
    """What a row has beside its prompt."""
    return {name: value for name, value in row.items() if name not in NOT_COLUMNS}


def answer_in(row: Mapping[str, object]) -> object:
    """The right answer of a row; None if it has none."""
    model = row.get("reward_model")
    if isinstance(model, Mapping) and model.get("ground_truth") is not None:
        return model["ground_truth"]
    for name in ANSWER_COLUMNS:
        if row.get(name) is not None:  # tables have every column, with null where a row has nothing
            return row[name]
    return None
