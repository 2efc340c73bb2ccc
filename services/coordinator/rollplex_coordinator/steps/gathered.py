"""What one training step has gathered so far, by group: from the first finished group to the metrics of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rollplex.advantages import group_advantages
from rollplex.protocol.common import Logprobs, Responses
from rollplex.protocol.reward import GroupRewarded, RewardFailed, RewardPart
from rollplex.protocol.trainer import Algorithm
from rollplex_coordinator.decisions.busy import Span


@dataclass(kw_only=True)
class Gathered:
    """Grows while the step runs; nothing is ever replaced.

    trainer_logprobs: only if tokens are written down.
    rewards: float64 [G] per group, all NaN for a group that is skipped. by_function: the same per reward function.
    parts: what functions report beside their rewards.
    rewarded: of groups whose texts are written down. stopped: per sample whether it ended by a stop id. prefix_spans,
    rollout_span: begin and end, seconds. spans: of every unit, with the devices that computed it.
    """

    responses: dict[int, Responses] = field(default_factory=dict)
    rollout_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    reference_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    trainer_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    rewards: dict[int, bytes] = field(default_factory=dict)
    by_function: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    parts: dict[int, tuple[RewardPart, ...]] = field(default_factory=dict)
    stopped: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    rewarded: dict[int, GroupRewarded] = field(default_factory=dict)
    skipped: dict[int, RewardFailed] = field(default_factory=dict)
    prefix_spans: list[tuple[float, float]] = field(default_factory=list)
    rollout_span: tuple[float, float] = (0.0, 0.0)
    spans: list[Span] = field(default_factory=list)

    def advantages(self, group: int, algorithm: Algorithm) -> tuple[float, ...]:
        """[G], as the trainer has them; NaN for a response without a reward. All groups of the step are rewarded."""
        every = np.frombuffer(b"".join(self.rewards[index] for index in sorted(self.rewards)), "<f8")
        found = group_advantages(
            np.frombuffer(self.rewards[group], "<f8"),
            loss=algorithm.loss,
            scale=algorithm.scale_rewards,
            batch_rewards=every,
        )
        return tuple(
            value if weight else math.nan
            for value, weight in zip(found.values.tolist(), found.weights.tolist(), strict=True)
        )
