"""What the prefix service holds between instructions: one entry per prefix unit that is alive.

Owns the autograd graphs and reference K/V, and that each is used once and dropped. Knows nothing of messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.errors import StateError
from rollplex.memory.tensors import KvViews
from rollplex.model.prefix import PrefixState
from rollplex.protocol.common import PromptSlot, SegmentRef


@dataclass(frozen=True, kw_only=True)
class Again:
    """A forward that kept no graph. `inputs` stays mapped until the step is over.

    layers: when it runs again, it keeps the inputs of the layers only.
    """

    inputs: SegmentRef
    prompts: tuple[PromptSlot, ...]
    copies: int
    layers: bool


@dataclass(frozen=True, kw_only=True)
class ActorUnit:
    """An actor prefix between forward and backward: its segment, and its graph or what it can be made from again."""

    step: int
    version: int
    kept: PrefixState | Again
    segment: int
    views: KvViews


@dataclass(frozen=True, kw_only=True)
class ReferenceUnit:
    """A reference prefix between forward and its last suffix unit. groups: of the unit's rows, `copies` rows each."""

    step: int
    state: PrefixState
    groups: tuple[int, ...]
    copies: int

    def rows(self, groups: tuple[int, ...]) -> slice:
        """The rows of consecutive groups of this unit.

        Raises:
            StateError: they are not consecutive groups of it.
        """
        start = self.groups.index(groups[0]) if groups and groups[0] in self.groups else -1
        if start < 0 or self.groups[start : start + len(groups)] != groups:
            raise StateError(
                "suffix groups are not a part of the prefix unit", got=str(groups), needed=f"a part of {self.groups}"
            )
        return slice(start * self.copies, (start + len(groups)) * self.copies)


class Units:
    """Live units by number."""

    def __init__(self) -> None:
        self._actor: dict[int, ActorUnit] = {}
        self._reference: dict[int, ReferenceUnit] = {}

    def keep_actor(self, unit: int, entry: ActorUnit) -> None:
        """From its forward on."""
        _new(unit, self._actor, "actor")
        self._actor[unit] = entry

    def keep_reference(self, unit: int, entry: ReferenceUnit) -> None:
        """From its forward on."""
        _new(unit, self._reference, "reference")
        self._reference[unit] = entry

    def take_actor(self, unit: int, step: int, version: int) -> ActorUnit:
        """For its backward; a graph is used once.

        Raises:
            StateError: no such unit, or its forward was in another step or on another weights version.
        """
        entry = self._actor.pop(unit, None)
        if entry is None or (entry.step, entry.version) != (step, version):
            got = "no such forward" if entry is None else f"a forward of step {entry.step}, version {entry.version}"
            raise StateError(
                f"cannot run the backward of prefix unit {unit}",
                got=got,
                needed=f"one of step {step}, version {version}",
            )
        return entry

    def reference(self, unit: int, step: int) -> ReferenceUnit:
        """For scoring.

        Raises:
            StateError: no such unit in this step.
        """
        entry = self._reference.get(unit)
        if entry is None or entry.step != step:
            raise StateError(
                f"cannot score against reference prefix unit {unit}",
                got=f"units {sorted(self._reference)}",
                needed=f"its forward in step {step}",
            )
        return entry

    def drop_reference(self, unit: int) -> None:
        """After its last suffix unit."""
        del self._reference[unit]

    @property
    def alive(self) -> str:
        """For errors."""
        return f"actor units {sorted(self._actor)}, reference units {sorted(self._reference)}"

    def require_empty(self) -> None:
        """At the gate nothing may depend on weights that are about to change.

        Raises:
            StateError: a unit is still alive.
        """
        if self._actor or self._reference:
            raise StateError("prefix units outlive their step", got=self.alive, needed="none at the gate")


def _new(unit: int, entries: dict[int, ActorUnit] | dict[int, ReferenceUnit], which: str) -> None:
    if unit in entries:
        raise StateError(
            f"a second {which} forward of prefix unit {unit}", got="one that is still alive", needed="none"
        )
