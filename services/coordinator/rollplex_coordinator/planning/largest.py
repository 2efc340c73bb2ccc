"""The largest prompt and the largest batch with which a placement still fits: a search on the plan itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollplex.errors import ConfigError
from rollplex.planning.plan import Largest
from rollplex.protocol.common import HOST_INDEX
from rollplex_coordinator.decisions.peaks import plan_peak
from rollplex_coordinator.planning.placements import disaggregated_sides, place
from rollplex_coordinator.planning.question import Question

MAX_PROMPT_TOKENS = 2**20
"""A search does not go further."""


def largest(name: str, question: Question) -> Largest:
    """What fits of the placement `name`."""
    prefixes = name in ("rollplex", "disaggregated")
    replicas = disaggregated_sides(question)[0].replicas if name == "disaggregated" else question.replicas
    prompts = -(-question.config.data.prompts_per_iteration // replicas)
    limit = prompts if prefixes else prompts * question.config.rollout.group_size

    def longer(tokens: int) -> bool:
        return _fits(name, replace(question, prompt_tokens=tokens))

    def wider(count: int) -> bool:
        return _fits(name, question.with_batch(count) if prefixes else replace(question, micro_batch=count))

    return Largest(
        prompt_tokens=search(longer, max(1, question.image_tokens), MAX_PROMPT_TOKENS),
        batch=search(wider, 1, limit),
        batch_limit=limit,
        batch_of="prompts of a prefix batch" if prefixes else "whole sequences of a backward",
    )


def search(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number from `least` to `most` that fits, where every smaller one does too; 0: `least` does not."""
    if not fits(least):
        return 0
    good, step = least, 1
    while good + step <= most and fits(good + step):
        good, step = good + step, 2 * step
    bad = min(good + step, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def _fits(name: str, question: Question) -> bool:
    try:
        placement = place(name, question)
    except ConfigError:
        return False
    peaks = plan_peak(placement.blocks)
    return all(peak.minimum_bytes <= question.hbm_bytes for peak in peaks if peak.device.index != HOST_INDEX)
