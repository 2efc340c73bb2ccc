"""A reward for mathematical answers, by math-verify and sympy (extra `math`). Importing this takes about two seconds.

math-verify's own time limits, which are signals, are off: the limit on the whole call rules (`rewards.time_limit_s`).
What sympy would work on for ever is not given to it: towers of powers, long exponents and factorials of large numbers
are compared as texts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify

from rollplex.rewards.ready.texts import Columns, Completion, answer_in, keeps, right_answer, text_of

_POWER = r"(?:\^|\*\*)"
_TOWER = rf"{_POWER}\s*[({{][^(){{}}$a-zA-Z]*{_POWER}|{_POWER}\s*-?\d+\s*{_POWER}"
_LONG = rf"{_POWER}[\s({{-]*\d{{6,}}|\d{{6,}}[\s)}}]*!"
_EXPLODES = re.compile(f"{_TOWER}|{_LONG}", re.ASCII)
MAX_ANSWER_CHARS = 2_000
logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that its time limits are off


@keeps("column")
def math(completions: Sequence[Completion], *, column: str = "", **columns: Columns) -> list[float]:
    """1 if the answer is mathematically equal to the right one, 0 if not, or if none can be read.

    Both may be LaTeX, with or without $…$, or plain numbers and formulas. In a text without <answer>…</answer> and
    without \\boxed{…}, math-verify looks for the answer by its own rules.

    Raises:
        ValueError, RewardError: the row has no right answer, or one that math-verify cannot read.
    """
    right = str(right_answer(columns, column))
    wanted = _expressions(answer_in(right), whole=False)
    if not wanted:
        raise ValueError(f"the right answer of this row is no mathematics that can be read: {right[:200]!r}")
    return [_score(text_of(completion), answer_in(right), wanted) for completion in completions]


def _score(text: str, right: str, wanted: list[Any]) -> float:
    answer = answer_in(text)
    if len(answer) > MAX_ANSWER_CHARS:
        answer = answer[-MAX_ANSWER_CHARS:]
    if _EXPLODES.search(answer) or _EXPLODES.search(right):
        return float(_bare(answer) == _bare(right))
    return float(verify(wanted, _expressions(answer, whole=answer == text.strip()), timeout_seconds=None))


def _expressions(answer: str, *, whole: bool) -> list[Any]:
    """As math-verify reads it; what was taken out of tags or a box is put into one again, so that all of it counts."""
    if _EXPLODES.search(answer):
        return [answer]
    boxed = answer if whole or "$" in answer or not answer else f"\\boxed{{{answer}}}"
    found: list[Any] = parse(boxed, parsing_timeout=0)
    return found


def _bare(text: str) -> str:
    return re.sub(r"[\s{}$]", "", text)
