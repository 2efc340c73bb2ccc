"""The phases of a run, in the order in which an iteration goes through them, and how many iterations there can be."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

MOST_ITERATIONS: Final = 2**31 - 1
"""Of a run."""


class Phase(IntEnum):
    """What the node is doing (design section 2). Exactly one at a time.

    The numbers are the order: whoever enters a phase of a lower number begins a new round (normally EVAL, CHECKPOINT or
    UPDATE to IDLE or ROLLOUT), and nothing that belongs to one iteration survives that.
    """

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
    """The run is ending: what runs is finished, nothing new starts. Nothing follows."""


WORKING_PHASES = tuple(phase for phase in Phase if phase is not Phase.DRAIN)
"""All in which memory is planned for: in DRAIN it is only given back."""
