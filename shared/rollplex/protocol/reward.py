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


class Form(StrEnum):
    """In which system's way a function is called; auto: told from its arguments."""

    AUTO = "auto"
    TRL = "trl"
    VERL = "verl"
    EASYR1 = "easyr1"


class RewardFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the user's functions."""

    spec: Name
    """package.module:function, or path/to/file.py:function."""
    weight: Finite
    signature: Form = Form.AUTO
    options: Text = "{}"
    """A JSON object: further keyword arguments of every call."""


# coordinator -> reward, once: import the functions, open the datasets. Answer: RewardsOpened.
class OpenRewards(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    model_path: Name
    sources: Annotated[tuple[DataSource, ...], Meta(max_length=64)]
    functions: Annotated[tuple[RewardFunction, ...], Meta(max_length=64)]
    time_limit_s: Seconds
    """For all functions together on one group."""
    memory_limit_bytes: Count
    """RLIMIT_AS of each process that runs functions; 0 is off."""
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """How many processes run functions, each on one group at a time."""


class RequiredColumns(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The columns without which a function cannot be called for a row."""

    names: Annotated[tuple[Name, ...], Meta(max_length=4_096)] = ()
    answer: bool = False
    """A right answer, in whichever column it is."""


# reward -> coordinator
class RewardsOpened(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    names: Annotated[tuple[Name, ...], Meta(max_length=64)]
    fingerprints: Annotated[tuple[Name, ...], Meta(max_length=64)]
    """Of the source file of each function (SHA-256, hex); "builtin" where it has none."""
    notes: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    """Per function in words: whose signature it has, and by what that was told."""
    required: Annotated[tuple[RequiredColumns, ...], Meta(max_length=64)] = ()
    """Per function; empty: not known."""


# coordinator -> reward: score one group. Answer: GroupRewarded or RewardFailed, in any order of the groups.
class RewardGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    source: Name
    row: Count
    responses: Responses
    stopped: Annotated[tuple[bool, ...], Meta(max_length=MAX_ITEMS)]
    """Per sample: ended by a stop id (else by max_new_tokens)."""


class RewardProblem(StrEnum):
    """Why a group got no reward."""

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    WRONG_COUNT = "wrong_count"
    WRONG_TYPE = "wrong_type"


class RewardPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that a function reports beside its rewards; not learned from."""

    function: Annotated[int, Meta(ge=0, le=63)]
    """Index among the functions."""
    name: Name
    values: Blob
    """float64, finite, one for each sample (or call) that has it."""


# reward -> coordinator
class GroupRewarded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    group: Count
    rewards: Blob
    """float64 [G]: the weighted sum over functions; a function that returned None for a sample abstains there."""
    by_function: Annotated[tuple[Blob, ...], Meta(max_length=64)]
    """Per function float64 [G], NaN where it abstained."""
    parts: Annotated[tuple[RewardPart, ...], Meta(max_length=4_096)] = ()
    texts: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)]
    """The decoded completions."""
    start_s: Seconds
    end_s: Seconds


# reward -> coordinator: a function could not score this group. The child goes on with the others, whatever the function
# did: it replaces the process that ran it.
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
