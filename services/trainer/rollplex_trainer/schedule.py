"""The learning rate as a pure function of the number of committed updates."""

from __future__ import annotations

import math

from rollplex.errors import ConfigError
from rollplex.protocol.trainer import Optimizer


def learning_rate(settings: Optimizer, update: int) -> float:
    """The learning rate of update number `update`, counted from 0 (the weights version that it starts from).

    Warm-up is linear and ends at the full rate: update k of w warm-up updates has (k + 1) / w of it, so that the first
    update is not lost on a rate of 0. Afterwards, with p = (k - w) / (total - w) going from 0 towards 1 and held at 1:

        constant  1
        linear    1 - (1 - final) p
        cosine    final + (1 - final) (1 + cos(pi p)) / 2          SGDR, arXiv 1608.03983, eq. 5

    Raises:
        ConfigError: unknown schedule.
    """
    warmup, total = settings.warmup_steps, settings.total_steps
    if update < warmup:
        return settings.lr * (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    final = settings.final_lr_ratio
    match settings.schedule:
        case "constant":
            return settings.lr
        case "linear":
            return settings.lr * (1 - (1 - final) * progress)
        case "cosine":
            return settings.lr * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)
        case _:
            raise ConfigError(
                "Unknown learning-rate schedule",
                got=repr(settings.schedule),
                needed="constant, linear or cosine",
                where="optimizer.schedule",
            )
