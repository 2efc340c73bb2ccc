"""Replicas have summed the same numbers in the same order: a vote that differs in any bit ends the run."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from rollplex.errors import StateError
from rollplex.protocol.common import Device, Parallel, Role
from rollplex.protocol.trainer import UpdateVote
from rollplex_coordinator.decisions.fleet import Team
from rollplex_coordinator.decisions.votes import same_vote

TEAMS = [
    Team(role=Role.TRAINER, index=n, devices=(Device(index=n),), parallels=(Parallel(replica=n, replicas=3),))
    for n in range(3)
]
VOTE = UpdateVote(
    cause=1, step=4, finite=True, start_s=0.0, end_s=1.0, metrics={"loss": 0.1, "entropy": math.nan, "kl": -0.0}
)


def test_replicas_that_say_the_same_have_one_vote_whoever_was_first() -> None:
    others = [replace(VOTE, cause=n, start_s=float(n), end_s=9.0) for n in range(3)]
    found = same_vote({TEAMS[n]: others[n] for n in (2, 0, 1)})
    assert found is others[0]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"finite": False}, "finite"),
        ({"metrics": {**VOTE.metrics, "loss": math.nextafter(0.1, 1.0)}}, "loss"),
        ({"metrics": {**VOTE.metrics, "kl": 0.0}}, "kl"),
        ({"metrics": {**VOTE.metrics, "more": 1.0}}, "more"),
        ({"metrics": {"loss": 0.1}}, "entropy"),
    ],
)
def test_a_difference_is_named_with_both_values_and_teams(changed: dict[str, object], name: str) -> None:
    votes = {TEAMS[0]: VOTE, TEAMS[1]: VOTE, TEAMS[2]: replace(VOTE, **changed)}
    with pytest.raises(StateError, match=f"step 4: {name}") as caught:
        same_vote(votes)
    assert "trainer[0:2]" in str(caught.value)
