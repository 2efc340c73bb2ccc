"""Errors that the coordinator words for others: reward failures."""

from __future__ import annotations

from rollplex.errors import RewardError
from rollplex.protocol.reward import RewardFailed, RewardProblem

PROBLEMS = {
    RewardProblem.RAISED: "raised",
    RewardProblem.TIMED_OUT: "did not return in time",
    RewardProblem.NOT_FINITE: "returned a number that is not finite",
    RewardProblem.WRONG_COUNT: "returned the wrong number of rewards",
    RewardProblem.WRONG_TYPE: "returned something that is not a number",
}


def reward_error(message: RewardFailed, where: str) -> RewardError:
    """A failed reward as an error: function, row and group are named; a traceback comes last."""
    sentence, _, trace = message.detail.partition("\n")
    return RewardError(
        f"reward function {message.function} {PROBLEMS[message.problem]}",
        got=sentence,
        needed="one finite number, or None to abstain, per completion, within rewards.time_limit_s",
        do="Mend the function, or set rewards.on_error: skip_group to leave such groups out."
        + (trace and f"\n{trace}"),
        where=f"{where}, group {message.group}, {message.place or f'row {message.row}'}",
    )
