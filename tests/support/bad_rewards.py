"""Reward functions that misbehave on some rows, as users' functions do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def good(completions: Sequence[Any], **_: object) -> list[float]:
    """Always 1: what a skipped group must not get from anybody."""
    return [1.0] * len(completions)


def moody(completions: Sequence[Any], mood: Sequence[str], **_: object) -> list[Any]:
    """What the row's column `mood` says."""
    count = len(completions)
    if mood[0] == "raise":
        raise RuntimeError("this row is not to my taste")
    if mood[0] == "hang":
        time.sleep(3600)
    answers: dict[str, list[Any]] = {
        "nan": [float("nan")] * count,
        "few": [1.0] * (count - 1),
        "text": ["good"] * count,
    }
    return answers.get(mood[0], [0.25 * index for index in range(count)])
