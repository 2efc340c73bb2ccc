"""TRL's batch signature: f(prompts=…, completions=…, completion_ids=…, **columns) -> list of rewards.

Owns what a function is called with. As in TRL, a conversational prompt gives conversational completions
([[{"role": "assistant", "content": text}], …]), a plain text plain texts, and each column of the row is repeated once
per completion. Other than in TRL, a function that does not take **kwargs gets only what it names.

Pure; imports nothing heavy, because it runs in the process of the user's functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from rollplex.data.columns import columns_of
from rollplex.errors import RewardError


def batch(row: Mapping[str, object], texts: Sequence[str], ids: Sequence[Sequence[int]]) -> dict[str, list[object]]:
    """Everything that a reward function may ask for, by name; each list as long as `texts`.

    Args:
        row: of the dataset, as it stands in the file.
        texts: the decoded completions of one group.
        ids: their tokens.
    """
    prompt = row["prompt"]
    completions: list[object] = list(texts)
    if not isinstance(prompt, str):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    repeated = {name: [value] * len(texts) for name, value in columns_of(row).items()}
    return {
        **repeated,
        "prompts": [prompt] * len(texts),
        "completions": completions,
        "completion_ids": [list(sample) for sample in ids],
    }


class Signature:
    """Which keywords a function takes.

    Raises:
        RewardError: a function that cannot be called with keywords alone.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise RewardError("This function does not show its arguments", got=str(error)) from error
        fixed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if fixed:
            raise RewardError(
                "This function takes arguments by position only",
                got=", ".join(fixed),
                needed="TRL's signature: f(prompts, completions, <columns>, **kwargs)",
            )
        named = [p for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = [p.name for p in named]
        self._required = [p.name for p in named if p.default is p.empty]

    def pick(self, available: Mapping[str, list[object]]) -> dict[str, list[object]]:
        """The keywords of one call.

        Raises:
            RewardError: the function needs a column that the row lacks.
        """
        missing = [name for name in self._required if name not in available]
        if missing:
            raise RewardError(
                "The function asks for what the row lacks",
                got=f"arguments {missing}",
                needed=f"some of {sorted(available)}",
            )
        if self._takes_all:
            return dict(available)
        return {name: available[name] for name in self._names if name in available}
