"""The phases of a run, in the order in which an iteration goes through them."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What the node is doing (design section 2). Exactly one at a time."""

    IDLE = 0
    """Between iterations; nothing is running."""
    LOAD = 1
    """Weights are filled and mapped, processes come up."""
    ROLLOUT = 2
    """Tokens are sampled; the window in which prefix work may run."""
    SCORE = 3
    """Sampling is over; the reference scores responses."""
    TRAIN = 4
    """Suffixes and prefixes run backward; nothing is left to score."""
    UPDATE = 5
    """The gate is closed: drain, vote, step, publish."""
    CHECKPOINT = 6
    """Weights and optimizer state are written to disk."""
    EVAL = 7
    """Greedy rollout at a fixed version; changes nothing."""
    DRAIN = 8
    """The run is ending: what runs is finished, nothing new starts."""


ITERATION = (Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN, Phase.UPDATE)
"""The phases of one iteration, in order."""


def rest_of_iteration(phase: Phase) -> tuple[Phase, ...]:
    """`phase` and what is still to come in its iteration; only itself outside an iteration."""
    return ITERATION[ITERATION.index(phase) :] if phase in ITERATION else (phase,)
