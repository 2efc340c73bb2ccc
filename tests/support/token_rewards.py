"""A reward that depends on the sampled text, so that advantages are not zero and every group has spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def by_bytes(completions: Sequence[Any], **_: object) -> list[float]:
    """A number from 0 to 1 that a random model's answers spread over."""
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [sum(text.encode("utf-8", "replace")) % 7 / 6 for text in texts]
