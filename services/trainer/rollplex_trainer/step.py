"""Where one training step stands.

Owns: the order in which a step's instructions may come, and what is summed over it. Does not know: tensors, segments.

    open ── suffix units, ascending ──► open ── prepare ──► voted yes ── apply ──► gone
                                                        └─► voted yes or no ── skip ──► gone
    open ── whole sequences, once   ──► open ── prepare ──► refused      ── skip ──► gone
"""

from __future__ import annotations

from enum import StrEnum

from rollplex.errors import StateError
from rollplex.protocol.trainer import Algorithm
from rollplex_trainer.metrics import StepMetrics


class Stage(StrEnum):
    """What has happened to the gradients of a step."""

    OPEN = "open"
    """They are being added up."""
    ACCEPTED = "accepted"
    """They are final and finite: the weights may be stepped with them."""
    REFUSED = "refused"
    """They are not finite, there is nothing to learn from, or they are only to be looked at: they may only be
    dropped."""


class Step:
    """One step from its first suffix unit (or its vote, if it has none) to its update."""

    def __init__(self, step: int, version: int, algorithm: Algorithm) -> None:
        self.step = step
        self.version = version
        self.stage = Stage.OPEN
        self.metrics = StepMetrics(algorithm)
        self.whole = False
        """The gradients are of whole sequences, so none are in the prefix service's arena."""
        self._last_unit = -1

    @property
    def has_units(self) -> bool:
        """Whether it has suffix units: then gradients are in the prefix service's arena too. Without any, what lies
        there is of an earlier step, since the prefix service clears it when it first adds to it."""
        return self._last_unit >= 0

    def begin_unit(self, unit: int) -> None:
        """Raises StateError if the gradients are final, or the unit is not after the last one."""
        self.require(Stage.OPEN, f"train suffix unit {unit}")
        self._require_unmixed(self.whole)
        if unit <= self._last_unit:
            raise StateError(
                "Suffix units must come in the order of their ids",
                got=f"unit {unit} after unit {self._last_unit}",
                needed="a later one",
                where=f"step {self.step}",
            )
        self._last_unit = unit

    def begin_whole(self) -> None:
        """Raises StateError if the gradients are final, or the step has others already."""
        self.require(Stage.OPEN, "train whole sequences")
        self._require_unmixed(self.whole or self._last_unit >= 0)
        self.whole = True

    def _require_unmixed(self, others: bool) -> None:
        if others:
            raise StateError(
                "Whole sequences are trained alone",
                got="other gradients of the same step",
                needed="a step of their own",
                where=f"step {self.step}",
            )

    def require(self, stage: Stage, action: str) -> None:
        """Raises StateError in any other stage."""
        if self.stage is not stage:
            raise StateError(
                f"The trainer cannot {action} now",
                got=f"gradients {self.stage}",
                needed=f"gradients {stage}",
                where=f"step {self.step}, version {self.version}",
            )

    def require_same(self, step: int, version: int | None = None) -> None:
        """Raises StateError if an instruction speaks of another step or weights version."""
        if step != self.step or version not in (None, self.version):
            raise StateError(
                "The trainer is in the middle of another step",
                got=f"step {step}" if version is None else f"step {step}, version {version}",
                needed=f"step {self.step}, version {self.version}, until it is applied or skipped",
            )
