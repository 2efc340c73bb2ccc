"""Where the run is: plain lines, at most one a second and always the last one; on a terminal a table that is redrawn.

What went wrong in an iteration, evaluations and warnings are lines in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TextIO

from rollplex.terminal.pace import Pace
from rollplex.terminal.screen import Screen, can_draw
from rollplex.terminal.view import Evaluation, View, assemble, evaluation
from rollplex_coordinator.http.views import BudgetView, ServiceView, StatusView
from rollplex_coordinator.saying import TERMINAL, say

EVERY_S = 1.0
MANY = 10


Look = Callable[[], tuple[StatusView, tuple[BudgetView, ...], tuple[ServiceView, ...]]]
"""Status, memory and services at this moment."""


def make_progress(stream: TextIO, look: Look) -> Progress:
    """A table where the stream is a terminal that can draw one; else plain lines."""
    return TableProgress(Screen(stream), look) if can_draw(stream) else Progress()


class Progress:
    """Says how iterations go, in plain lines."""

    def __init__(self) -> None:
        self._said_s = 0.0
        self._without_spread = 0

    def iteration(self, done: int, total: int, metrics: Mapping[str, object]) -> None:
        """One iteration is over. One that taught nothing is always told, and why."""
        if metrics.get("updated") == 0.0:
            self.say(f"iteration {done}/{max(done, total)}  no update: {_why_no_update(metrics)}")
            return
        self._warn_without_spread(metrics)
        self._good(done, total, metrics)

    def turn(self) -> None:
        """The loop turned; often, so this must cost nothing."""

    def stop(self) -> None:
        """Nothing is said here any more; others write to the terminal."""

    def _good(self, done: int, total: int, metrics: Mapping[str, object]) -> None:
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

    def _warn_without_spread(self, metrics: Mapping[str, object]) -> None:
        self._without_spread = self._without_spread + 1 if metrics.get("frac_reward_zero_std") == 1.0 else 0
        if self._without_spread == MANY:
            self.say(
                f"warning: in {MANY} iterations every group had equal rewards, so the rewards teach nothing. Look at "
                "the reward function and at what it is given (what it prints is in logs/reward.log)."
            )

    def say(self, text: str) -> None:
        """One line."""
        say(text)


class TableProgress(Progress):
    """Draws a table of the run in place; what else is said appears above it."""

    def __init__(self, screen: Screen, look: Look, wall: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._screen = screen
        self._look = look
        self._wall = wall
        self._pace = Pace()
        self._evaluations: dict[str, Evaluation] = {}

    def iteration(self, done: int, total: int, metrics: Mapping[str, object]) -> None:
        self._pace.add(metrics)
        super().iteration(done, total, metrics)

    def evaluation(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluations[name] = evaluation(name, step, metrics)
        super().evaluation(name, step, metrics)

    def turn(self) -> None:
        if self._screen.due():
            self._draw(lambda: self._screen.show(self._view()))

    def stop(self) -> None:
        if self._screen.drawn:
            self._draw(lambda: self._screen.show(self._view()))  # the last state stays on the terminal
        self._draw(self._screen.stop)

    def _draw(self, what: Callable[[], None]) -> None:
        """A terminal that is gone is not drawn on again."""
        try:
            what()
        except OSError as error:
            with suppress(OSError):
                self._screen.stop()
            TERMINAL.lose(error)

    def _good(self, done: int, total: int, metrics: Mapping[str, object]) -> None:
        pass  # the table has it

    def _view(self) -> View:
        status, devices, services = self._look()
        return assemble(
            status,
            devices,
            services,
            pace=self._pace,
            evaluations=self._evaluations.values(),
            now_wall_s=self._wall(),
        )


def _why_no_update(metrics: Mapping[str, object]) -> str:
    groups, skipped, failed = (metrics.get(key) for key in ("groups", "groups_skipped", "skipped_groups"))
    if groups != skipped:
        return "a gradient or the loss is not finite"
    if failed == groups:
        return "every group was left out, because a reward function failed (logs/reward.log says how)"
    return "no group has a reward: the reward functions failed or returned None for every sample"
