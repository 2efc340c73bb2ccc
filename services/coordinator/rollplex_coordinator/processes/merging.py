"""One answer of several processes that work together: what counts, and what must be the same. Pure.

    field                      merged answer
    -------------------------  -----------------------------------------------------------------------------------
    cause                      the leader's
    start_s, end_s             the first start, the last end
    held, private              of all processes, by rank
    all others                 the leader's; another process that says something else is an error, also in one bit

A team is one instruction with a cause for each rank. Its answer is complete when every rank has given its own; of
answers that come in pieces (`STREAMED`), each piece is. Answers that are about a device (`OF_A_DEVICE`) are not merged:
each is passed on as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from rollplex.errors import StateError
from rollplex.protocol.common import DigestReply, Loaded
from rollplex.protocol.rollout import GroupFinished, Prefilled
from rollplex.protocol.trainer import Published
from rollplex_coordinator.decisions.fleet import Team

STREAMED = (GroupFinished, Prefilled)
OF_A_DEVICE = (Loaded, Published, DigestReply)
MAX_SHOWN = 200
_FIRST = frozenset({"start_s"})
_LAST = frozenset({"end_s", "prefill_end_s"})
_ALL = frozenset({"held", "private"})
AnswerT = TypeVar("AnswerT", bound=Struct)


def merge(team: Team, answers: Sequence[AnswerT]) -> AnswerT:
    """The answer of a team.

    Args:
        answers: by rank.

    Raises:
        StateError: they are of several types, or disagree in what must be the same; names the field and both values.
    """
    leading, *others = answers
    changes: dict[str, Any] = {}
    for rank, other in enumerate(others, start=1):
        if type(other) is not type(leading):
            raise _disagreement(team, rank, "type of the answer", type(leading).__name__, type(other).__name__)
    for field in fields(leading):
        values = [getattr(answer, field.name) for answer in answers]
        if field.name in _FIRST:
            changes[field.name] = min(values)
        elif field.name in _LAST:
            changes[field.name] = max(values)
        elif field.name in _ALL:
            changes[field.name] = tuple(item for value in values for item in value)
        elif field.name != "cause":
            _check_same(team, f"{type(leading).__name__}.{field.name}", values)
    return replace(leading, **changes)


class Instruction:
    """What a team was told together, and what it has answered so far.

    Args:
        heard: told of each process's answer as it comes, with its rank.
    """

    def __init__(self, team: Team, heard: Callable[[int], None] = lambda _: None) -> None:
        self.team = team
        self.heard = heard
        self._answers: dict[int, Any] = {}
        self._pieces: dict[tuple[type, object], dict[int, Any]] = {}

    def answered(self, rank: int, message: Any) -> list[Any]:
        """A process's answer; returns what is to be passed on now.

        Raises:
            StateError: the processes disagree.
        """
        self.heard(rank)
        self._answers[rank] = message
        if isinstance(message, OF_A_DEVICE):
            return [message]
        return self._complete(self._answers)

    def piece(self, rank: int, message: GroupFinished | Prefilled) -> list[Any]:
        """One piece of a process's answer; the same.

        Raises:
            StateError: the processes disagree.
        """
        key = (type(message), message.responses.group if isinstance(message, GroupFinished) else message.unit)
        pieces = self._pieces.setdefault(key, {})
        pieces[rank] = message
        complete = self._complete(pieces)
        if complete:
            del self._pieces[key]
        return complete

    def _complete(self, answers: dict[int, Any]) -> list[Any]:
        if len(answers) < len(self.team.devices):
            return []
        return [merge(self.team, [answers[rank] for rank in range(len(self.team.devices))])]


def _check_same(team: Team, what: str, values: Sequence[Any]) -> None:
    """Compared by their bytes on the wire, in which a NaN equals itself and 0.0 is not -0.0."""
    first = _bytes(values[0])
    for rank, value in enumerate(values[1:], start=1):
        if _bytes(value) != first:
            raise _disagreement(team, rank, what, values[0], value)


def _bytes(value: object) -> bytes:
    return msgspec.msgpack.encode(value, order="deterministic")


def _disagreement(team: Team, rank: int, what: str, leading: object, other: object) -> StateError:
    return StateError(
        "Processes that compute the same batch have different results",
        got=f"{what}: {_shown(other)} from device {team.devices[rank]}",
        needed=f"{_shown(leading)}, as device {team.leader} has it",
        do="Run the same version of Rollplex and its libraries in every process.",
        where=str(team),
    )


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
