"""Marks of one track as begins and ends that nest, which is what a Perfetto track can hold. Pure.

Within a lane an end always belongs to the newest begin, and time never goes back. Marks that overlap without nesting
go to lanes of their own (tracks of the same name, which the viewer draws as one).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct, field

from rollplex.trace.marks import Mark


class Edge(IntEnum):
    """What happens at a moment of a lane."""

    BEGIN = 1
    END = 2
    MOMENT = 3


class Turn(Struct, frozen=True, gc=False):
    """One edge of one mark."""

    at_ns: int
    edge: Edge
    mark: Mark


class Lane(Struct):
    """One lane, from chapter to chapter. `frontier_ns`: the time of its last turn."""

    frontier_ns: int = -(2**63)
    _open: list[tuple[int, Mark]] = field(default_factory=list)
    _turns: list[Turn] = field(default_factory=list)

    def holds(self, mark: Mark) -> bool:
        """Whether the mark can follow what the lane has."""
        if mark.start_ns < self.frontier_ns:
            return False
        over = self._over(mark)
        return over == 0 or mark.end_ns is None or mark.end_ns <= self._open[over - 1][0]

    def add(self, mark: Mark) -> None:
        """Append a mark that it `holds`."""
        self._close(self._over(mark))
        if mark.end_ns is None:
            self._turn(mark.start_ns, Edge.MOMENT, mark)
        else:
            self._turn(mark.start_ns, Edge.BEGIN, mark)
            self._open.append((mark.end_ns, mark))

    def take(self) -> list[Turn]:
        """Everything since the last call, with all of it ended."""
        self._close(0)
        turns, self._turns = self._turns, []
        return turns

    def _over(self, mark: Mark) -> int:
        """How many of the open marks go on when this one begins. A moment still belongs to what ends with it."""
        depth = len(self._open)
        while depth:
            end_ns = self._open[depth - 1][0]
            if end_ns > mark.start_ns or (end_ns == mark.start_ns and mark.end_ns is None):
                break
            depth -= 1
        return depth

    def _close(self, depth: int) -> None:
        while len(self._open) > depth:
            end_ns, mark = self._open.pop()
            self._turn(end_ns, Edge.END, mark)

    def _turn(self, at_ns: int, edge: Edge, mark: Mark) -> None:
        self._turns.append(Turn(at_ns, edge, mark))
        self.frontier_ns = at_ns


def arrange(marks: Iterable[Mark], lanes: list[Lane]) -> list[list[Turn]]:
    """The marks of one track and chapter as turns, one list per lane; lanes are added where needed."""
    for mark in sorted(marks, key=_longest_first):
        lane = next((lane for lane in lanes if lane.holds(mark)), None)
        if lane is None:
            lane = Lane()
            lanes.append(lane)
        lane.add(mark)
    return [lane.take() for lane in lanes]


def _longest_first(mark: Mark) -> tuple[int, int]:
    return mark.start_ns, -(mark.start_ns if mark.end_ns is None else mark.end_ns)
