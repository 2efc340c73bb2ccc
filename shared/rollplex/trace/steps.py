"""Which iterations are meant: the option `--steps`, and what is taken when it is not given. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from rollplex.errors import ConfigError

_FORM = re.compile(r"([0-9]{0,15}):([0-9]{0,15})|([0-9]{1,15})")


class Steps(Struct, frozen=True, kw_only=True):
    """Iterations `first` to `end` - 1; `end` None: to the last one."""

    first: int = 0
    end: int | None = None

    def __contains__(self, step: int) -> bool:
        return step >= self.first and (self.end is None or step < self.end)

    def __str__(self) -> str:
        return f"{self.first}:{'' if self.end is None else self.end}"


def parse_steps(text: str) -> Steps:
    """`A:B` (from A up to but not including B), `A:`, `:B`, or one number.

    Raises:
        ConfigError: neither of these, or no number lies in it.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or text.strip() == ":":
        raise ConfigError(
            "Not a range of iterations",
            got=repr(text),
            needed="A:B (from A up to but not including B), A:, :B, or one number",
            where="--steps",
        )
    first, end, single = match.groups()
    if single is not None:
        return Steps(first=int(single), end=int(single) + 1)
    steps = Steps(first=int(first or 0), end=int(end) if end else None)
    if steps.end is not None and steps.end <= steps.first:
        raise ConfigError("No iteration lies in this range", got=text, needed="A:B with A below B", where="--steps")
    return steps


def newest(steps: list[int], count: int) -> Steps:
    """The last `count` of the iterations that there are."""
    return Steps(first=steps[-count]) if len(steps) > count else Steps()


def span(steps: list[int]) -> str:
    """In words, for a person: "iteration 3", "iterations 3 to 9"."""
    if not steps:
        return "no iteration"
    low, high = min(steps), max(steps)
    return f"iteration {low}" if low == high else f"iterations {low} to {high}"


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers for a person: "0-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
