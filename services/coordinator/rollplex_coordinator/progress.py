"""Plain lines on the terminal: where the run is. At most one a second, and always the last one."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

EVERY_S = 1.0


class Progress:
    """Says how iterations go."""

    def __init__(self) -> None:
        self._said_s = 0.0

    def iteration(self, done: int, total: int, metrics: Mapping[str, object]) -> None:
        """One iteration is over."""
        now = time.monotonic()
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

    def say(self, text: str) -> None:
        """One line."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
