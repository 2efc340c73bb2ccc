"""The benches' reward function: every group gets a spread of rewards, whatever the model says. Knows texts only."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

Completion: TypeAlias = str | Sequence[Mapping[str, object]]
"""TRL gives texts, or lists of messages for conversational prompts."""

STEPS: Final = 8


def spread(completions: Sequence[Completion], **_: object) -> list[float]:
    """A number from 0 to 1 for each response, a function of its text alone: the same in every schedule, and seldom the
    same for a whole group, so that there is a gradient."""
    return [
        zlib.crc32(_text(completion).encode("utf-8", "replace")) % STEPS / (STEPS - 1) for completion in completions
    ]


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
