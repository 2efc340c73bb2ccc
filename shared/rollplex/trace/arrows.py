"""What led to what in one iteration: chains of marks. Pure.

    group done ─► reward ─► suffix unit of the group ─► backward of its prefix unit ─► update
    actor prefix unit ─► each suffix unit that attends to it
    reference prefix unit ─► score of a suffix unit ─► that suffix unit (they have one number)
    BEGIN to COMMIT ─► optimizer step

A link that is not there (a group without reward, a run that was killed) is left out; what is left is linked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollplex.journal.events import UnitKind
from rollplex.trace.marks import Mark


class Arrows:
    """Collects one iteration's marks by what they did to which groups."""

    def __init__(self) -> None:
        self.done: dict[int, Mark] = {}
        """Group to the moment its last sample stopped."""
        self.rewarded: dict[int, Mark] = {}
        self.update: Mark | None = None
        self.writing: Mark | None = None
        self.optimizer: Mark | None = None
        self._units: dict[UnitKind, dict[int, tuple[frozenset[int], Mark]]] = {kind: {} for kind in UnitKind}

    def unit(self, kind: UnitKind, unit: int, groups: Sequence[int], mark: Mark) -> None:
        """A unit is over. One that was lost and done again counts as it was done last."""
        self._units[kind][unit] = (frozenset(groups), mark)

    def chains(self) -> list[tuple[Mark, ...]]:
        """All of them."""
        chains = [*self._of_groups(), *self._of_suffixes(), _chain(self.writing, self.optimizer)]
        return [chain for chain in chains if len(chain) > 1]

    def _of_groups(self) -> Iterator[tuple[Mark, ...]]:
        suffix = self._by_group(UnitKind.SUFFIX)
        backward = self._by_group(UnitKind.PREFIX_BACKWARD)
        for group, done in self.done.items():
            rewarded = self.rewarded.get(group)
            yield _chain(done, rewarded, suffix.get(group), backward.get(group), self.update)

    def _of_suffixes(self) -> Iterator[tuple[Mark, ...]]:
        actor = self._by_group(UnitKind.ACTOR_PREFIX)
        reference = self._by_group(UnitKind.REFERENCE_PREFIX)
        suffixes, scores = self._units[UnitKind.SUFFIX], self._units[UnitKind.SCORE]
        for groups, suffix in suffixes.values():
            yield _chain(*(actor.get(group) for group in _first(groups)), suffix)
        for unit, (groups, score) in scores.items():
            _, suffix_or_none = suffixes.get(unit, (groups, None))
            yield _chain(*(reference.get(group) for group in _first(groups)), score, suffix_or_none)

    def _by_group(self, kind: UnitKind) -> dict[int, Mark]:
        return {group: mark for groups, mark in self._units[kind].values() for group in groups}


def _first(groups: frozenset[int]) -> list[int]:
    """One group stands for its unit: a suffix unit lies within one prefix unit."""
    return [min(groups)] if groups else []


def _chain(*links: Mark | None) -> tuple[Mark, ...]:
    """Those that are there and do not begin before the one they follow."""
    chain: list[Mark] = []
    for link in links:
        if link is not None and (not chain or link.start_ns >= chain[-1].start_ns):
            chain.append(link)
    return tuple(chain)
