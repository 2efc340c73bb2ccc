"""What of one step is done: every group sampled once, trained once, every prefix unit backward once (I7). Pure.

Keeps count; the gate decides what follows and refuses. Each `why_not` answers what an event would need, or "".
"""

from __future__ import annotations

from collections.abc import Sequence


class Tally:
    """One step of `num_groups` groups, cut into prefix units."""

    def __init__(self, num_groups: int, prefix_units: Sequence[Sequence[int]]) -> None:
        self._num_groups = num_groups
        self._units = tuple(tuple(unit) for unit in prefix_units)
        self.sampled: set[int] = set()
        self.trained: set[int] = set()
        self.backward: set[int] = set()

    @property
    def covered(self) -> bool:
        """Whether there are groups, each in exactly one prefix unit."""
        members = sorted(group for unit in self._units for group in unit)
        return self._num_groups > 0 and members == list(range(self._num_groups))

    def why_not_sampled(self, group: int) -> str:
        if not 0 <= group < self._num_groups:
            return f"a group from 0 to {self._num_groups - 1}"
        return "each group once" if group in self.sampled else ""

    def why_not_trained(self, group: int) -> str:
        if group not in self.sampled:
            return "a group of this step that was sampled"
        return "each group once" if group in self.trained else ""

    def why_not_backward(self, unit: int) -> str:
        if not 0 <= unit < len(self._units):
            return f"a prefix unit from 0 to {len(self._units) - 1}"
        if unit in self.backward:
            return "each prefix unit once"
        untrained = sorted(set(self._units[unit]) - self.trained)
        return f"groups {untrained} trained before" if untrained else ""

    def why_not_closed(self) -> str:
        if untrained := sorted(set(range(self._num_groups)) - self.trained):
            return f"groups {untrained} trained before"
        missing = sorted(set(range(len(self._units))) - self.backward)
        return f"backward of prefix units {missing} before" if missing else ""
