"""What the trainers of all replicas say about a step must be the same: each has the sum over all of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rollplex.errors import StateError
from rollplex.protocol.trainer import UpdateVote
from rollplex_coordinator.decisions.fleet import Team


def same_vote(votes: Mapping[Team, UpdateVote]) -> UpdateVote:
    """The vote of all.

    Args:
        votes: of each trainer team; one at least.

    Raises:
        StateError: two of them differ, also in one bit; names what and both values.
    """
    (first, vote), *others = sorted(votes.items(), key=lambda item: item[0].index)
    mine = _said(vote)
    for team, other in others:
        theirs = _said(other)
        for name in sorted(mine.keys() | theirs.keys()):
            ours, its = mine.get(name), theirs.get(name)
            if msgspec.msgpack.encode(ours) != msgspec.msgpack.encode(its):  # a NaN is the same as itself
                raise StateError(
                    f"the replicas disagree about step {vote.step}: {name}",
                    got=f"{ours!r} from {first}, {its!r} from {team}",
                    needed="the same number: every replica has the gradients and metrics of the whole step",
                    do="This is an error of Rollplex, or of a machine whose processors differ.",
                )
    return vote


def _said(vote: UpdateVote) -> dict[str, float | None]:
    return {"finite": float(vote.finite), **vote.metrics}
