"""What the ready-made functions share: texts of completions, the answer in a text, right answers of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

from rollplex.rewards.call import answer_of
from rollplex.rewards.trl import OFFERED

Completion: TypeAlias = str | Sequence[Mapping[str, object]]
"""TRL gives texts, or lists of messages for conversational prompts."""
Columns: TypeAlias = object
"""[G] values of a column, the same one G times."""
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = "\\boxed{"
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., object])


def keeps(*names: str) -> Callable[[_FunctionT], _FunctionT]:
    """Mark arguments as options: no column of a dataset is ever given for them.

    One that is called "column" names where the right answer is; without it, it must be in one of the usual places.
    """

    def mark(function: _FunctionT) -> _FunctionT:
        function.reward_options = names  # type: ignore[attr-defined] # functions take attributes
        function.reward_answer = "column" if "column" in names else ""  # type: ignore[attr-defined]
        return function

    return mark


def text_of(completion: Completion) -> str:
    """The text of a completion."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer_in(text: str) -> str:
    """What the last <answer>…</answer> holds, else the last \\boxed{…}, else all of it; without blanks around it."""
    tags = _TAG.findall(text)
    if tags:
        return str(tags[-1]).strip()
    boxed = _last_boxed(text)
    return (text if boxed is None else boxed).strip()


def right_answer(columns: Mapping[str, object], column: str) -> object:
    """The right answer of the row whose columns these are, each repeated G times.

    Args:
        column: which has it; empty: the usual ones.

    Raises:
        RewardError: none of the usual ones is there.
        ValueError: no such column, or it is empty.
    """
    row = {
        name: values[0]
        for name, values in columns.items()
        if name not in OFFERED and isinstance(values, list) and values
    }
    if column and column not in row:
        raise ValueError(f"the row has no column {column!r}; it has {', '.join(sorted(row))}")
    answer = row[column] if column else answer_of(cast("Mapping[str, object]", row))
    if answer is None or answer == "":
        raise ValueError(f"the right answer of this row is empty: {answer!r}")
    return answer


def _last_boxed(text: str) -> str | None:
    """What the last \\boxed{…} holds, braces counted; None without a whole one."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for at in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len(_BOXED) : at]
    return None
