"""Plain lines on the terminal: where the run is. At most one a second, and always the last one."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

EVERY_S = 1.0
MANY = 10


class Progress:
    """Says how iterations go."""

    def __init__(self) -> None:
        self._said_s = 0.0
        self._without_spread = 0

    def iteration(self, done: int, total: int, metrics: Mapping[str, object]) -> None:
        """One iteration is over. One that taught nothing is always told, and why."""
        now = time.monotonic()
        if metrics.get("updated") == 0.0:
            self.say(f"iteration {done}/{max(done, total)}  no update: {_why_no_update(metrics)}")
            return
        self._warn_without_spread(metrics)
        if now - self._said_s < EVERY_S and done < total:
            return
        reward, seconds = metrics.get("reward"), metrics.get("time/step_s")
        hidden = metrics.get("time/prefix_in_window")
        parts = [f"iteration {done}/{max(done, total)}"]
        parts += [f"reward {reward:.3f}"] if isinstance(reward, float) else []
        parts += [f"{seconds:.2f} s"] if isinstance(seconds, float) else []
        parts += [f"{hidden:.0%} of prefix time hidden"] if isinstance(hidden, float) else []
        self.say("  ".join(parts))
        self._said_s = now

    def evaluation(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        """One evaluation is over."""
        means = [
            f"{key} {value:.3f}" for key, value in metrics.items() if key == "reward" or key.startswith("rewards/")
        ]
        self.say(f"evaluation {name} after {step}: {', '.join(means)} ({metrics['count']:.0f} rows)")

    def _warn_without_spread(self, metrics: Mapping[str, object]) -> None:
        self._without_spread = self._without_spread + 1 if metrics.get("frac_reward_zero_std") == 1.0 else 0
        if self._without_spread == MANY:
            self.say(
                f"warning: in {MANY} iterations every group had equal rewards, so the rewards teach nothing. Look at "
                "the reward function and at what it is given (what it prints is in logs/reward.log)."
            )

    def say(self, text: str) -> None:
        """One line."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _why_no_update(metrics: Mapping[str, object]) -> str:
    groups, skipped, failed = (metrics.get(key) for key in ("groups", "groups_skipped", "skipped_groups"))
    if groups != skipped:
        return "a gradient or the loss is not finite"
    if failed == groups:
        return "every group was left out, because a reward function failed (logs/reward.log says how)"
    return "no group has a reward: the reward functions failed or returned None for every sample"
