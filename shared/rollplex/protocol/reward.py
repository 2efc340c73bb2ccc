"""The channel between the coordinator and its reward child."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from rollplex.protocol.common import (
    MAX_ITEMS,
    Alive,
    Blob,
    Count,
    Failed,
    Finite,
    Leave,
    Leaving,
    Name,
    Received,
    Responses,
    Seconds,
    Text,
)
from rollplex.protocol.inputs import DataSource


class RewardFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the user's functions, with TRL's batch signature."""

    spec: Name
    """package.module:function, or path/to/file.py:function."""
    weight: Finite


# coordinator -> reward, once: import the functions, open the datasets. Answer: RewardsOpened.
class OpenRewards(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    model_path: Name
    sources: Annotated[tuple[DataSource, ...], Meta(max_length=64)]
    functions: Annotated[tuple[RewardFunction, ...], Meta(max_length=64)]
    time_limit_s: Seconds
    memory_limit_bytes: Count
    """RLIMIT_AS of the child; 0 is off."""


# reward -> coordinator
class RewardsOpened(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    names: Annotated[tuple[Name, ...], Meta(max_length=64)]


# coordinator -> reward: score one group. Answer: GroupRewarded or RewardFailed.
class RewardGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    source: Name
    row: Count
    responses: Responses


class RewardProblem(StrEnum):
    """Why a group got no reward."""

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    WRONG_COUNT = "wrong_count"
    WRONG_TYPE = "wrong_type"


# reward -> coordinator
class GroupRewarded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    group: Count
    rewards: Blob
    """float64 [G]: the weighted sum over functions; a function that returned None for a sample abstains there."""
    by_function: Annotated[tuple[Blob, ...], Meta(max_length=64)]
    """Per function float64 [G], NaN where it abstained."""
    texts: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)]
    """The decoded completions."""
    start_s: Seconds
    end_s: Seconds


# reward -> coordinator: a function could not score this group. After timed_out the child answers nothing more: it is to
# be replaced, and what it was sent since is sent again.
class RewardFailed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    group: Count
    row: Count
    place: Text = ""
    """The row as errors name it: file:line (row n)."""
    function: Name
    problem: RewardProblem
    detail: Text


ToReward: TypeAlias = OpenRewards | RewardGroup | Leave
FromReward: TypeAlias = Received | Alive | Leaving | Failed | RewardsOpened | GroupRewarded | RewardFailed
