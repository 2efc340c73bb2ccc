"""What is computed together in one step: a pure function of configuration and ids (design, "Bits").

Owns the cutting of a step's groups into decode, prefix and suffix units, and which engine and replica each belongs to.
Knows nothing of time, memory, schedules or messages: whatever happens during the step, the units stay the same, and so
do the bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class PrefixUnit(Struct, frozen=True, kw_only=True):
    """Prompts whose prefix is one forward pass; its responses are cut into `suffix` units."""

    index: int
    groups: tuple[int, ...]
    suffix: tuple[int, ...]


class SuffixUnit(Struct, frozen=True, kw_only=True):
    """Groups whose responses are one suffix pass, all against the K/V of prefix unit `prefix`."""

    index: int
    prefix: int
    groups: tuple[int, ...]


class StepPlan(Struct, frozen=True, kw_only=True):
    """The units of one step, each in the order of its ids. Engines and replicas take turns."""

    decode: tuple[tuple[int, ...], ...]
    prefix: tuple[PrefixUnit, ...]
    suffix: tuple[SuffixUnit, ...]
    engines: int = 1
    """Teams of the rollout."""
    replicas: int = 1
    """Teams of prefix and trainer."""

    @property
    def num_groups(self) -> int:
        return sum(len(unit) for unit in self.decode)

    def engine_of(self, decode: int) -> int:
        """Which engine samples a decode unit."""
        return decode % self.engines

    def replica_of(self, prefix: int) -> int:
        """Which replica computes a prefix unit, and its suffix units."""
        return prefix % self.replicas

    def decode_of(self, engine: int) -> tuple[int, ...]:
        """The decode units of an engine, in order."""
        return tuple(range(engine, len(self.decode), self.engines))

    def prefix_of(self, replica: int) -> tuple[int, ...]:
        """The prefix units of a replica, in order."""
        return tuple(range(replica, len(self.prefix), self.replicas))

    def suffix_of(self, replica: int) -> tuple[int, ...]:
        """The suffix units of a replica, in order."""
        return tuple(index for unit in self.prefix_of(replica) for index in self.prefix[unit].suffix)


def cut(items: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive pieces of at most `size`; 0 means one piece."""
    step = size or max(len(items), 1)
    return tuple(tuple(items[i : i + step]) for i in range(0, len(items), step))


def plan_step(
    num_groups: int,
    *,
    decode_prompts: int,
    prefix_prompts: int,
    suffix_prompts: int,
    engines: int = 1,
    replicas: int = 1,
) -> StepPlan:
    """Cut a step of `num_groups` groups. Sizes are in prompts; 0 means all that the enclosing unit has."""
    groups = range(num_groups)
    prefix: list[PrefixUnit] = []
    suffix: list[SuffixUnit] = []
    for index, members in enumerate(cut(groups, prefix_prompts)):
        pieces = cut(members, suffix_prompts)
        first = len(suffix)
        suffix += [SuffixUnit(index=first + i, prefix=index, groups=piece) for i, piece in enumerate(pieces)]
        prefix.append(PrefixUnit(index=index, groups=members, suffix=tuple(range(first, len(suffix)))))
    return StepPlan(
        decode=cut(groups, decode_prompts),
        prefix=tuple(prefix),
        suffix=tuple(suffix),
        engines=engines,
        replicas=replicas,
    )
