"""The digits demo's reward functions, with TRL's batch signature. They know texts only, no pictures and no model.

A response names a digit if it starts with a numeral or with an English word for one; what follows a numeral does not
matter, a word has to end: "3", " three", "3x" name it, "threeb" does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

Completion: TypeAlias = str | Sequence[Mapping[str, object]]
"""TRL gives texts, or lists of messages for conversational prompts."""

WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAMED_WRONG: Final = 0.2
"""For a digit's name that is not the right one. Safe only together with an entropy bonus and without scaling by the
standard deviation: otherwise the policy settles on one name."""
_START = re.compile(r"\s*([A-Za-z]+|[0-9])")


def named_digit(text: str) -> int | None:
    """The digit that a text starts with, or None."""
    match = _START.match(text)
    if match is None:
        return None
    name = match[1].lower()
    if name.isdigit():
        return int(name)
    return WORDS.index(name) if name in WORDS else None


def digit_reward(completions: Sequence[Completion], answer: Sequence[str], **_: object) -> list[float]:
    """1 for the right digit, 0.2 for another digit, 0 for anything else."""
    return [_score(_text(completion), right) for completion, right in zip(completions, answer, strict=True)]


def right(completions: Sequence[Completion], answer: Sequence[str], **_: object) -> list[float]:
    """1 for the right digit, 0 for anything else: its mean is the accuracy."""
    return [float(named_digit(_text(c)) == int(a)) for c, a in zip(completions, answer, strict=True)]


def _score(text: str, answer: str) -> float:
    digit = named_digit(text)
    if digit is None:
        return 0.0
    return 1.0 if digit == int(answer) else NAMED_WRONG


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
