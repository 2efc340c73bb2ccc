"""What the model answered, response by response: the lines of RUN/completions.jsonl.

Owns the form of a line. Knows nothing of which responses are kept, nor of the file.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from rollplex.protocol.common import Logprobs, Responses
from rollplex.protocol.reward import GroupRewarded

_LINE_ENDS = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))
"""What JSON allows inside a text, but many a reader takes for the end of a line."""


class Completion(Struct, frozen=True, kw_only=True):
    """One response.

    source: "train" or the evaluation's name. step, version: as in metrics.jsonl and eval.jsonl. group: its place within
    the step or the evaluation. reward, rewards: NaN where nothing was given; null in the file. advantage: what was
    learned by; NaN in an evaluation and where there is no reward. stopped: it ended by itself, not by its length. ids,
    logprobs: of each token, as the rollout gave them; trainer_logprobs: as the trainer has them. Only if the
    configuration asks for them.
    """

    source: str
    step: int
    version: int
    row: int
    group: int
    sample: int
    completion: str
    reward: float
    rewards: dict[str, float]
    advantage: float = math.nan
    tokens: int
    stopped: bool
    ids: tuple[int, ...] | UnsetType = UNSET
    logprobs: tuple[float, ...] | UnsetType = UNSET
    trainer_logprobs: tuple[float, ...] | UnsetType = UNSET


class Spoken(Struct, frozen=True, kw_only=True):
    """A group's tokens, and what rollout and trainer say of them."""

    tokens: Responses
    rollout: Logprobs
    trainer: Logprobs


def completions_of(
    message: GroupRewarded,
    *,
    source: str,
    version: int,
    row: int,
    group: int,
    lengths: Sequence[int],
    stopped: Sequence[bool],
    names: Sequence[str],
    advantages: Sequence[float] = (),
    spoken: Spoken | None = None,
) -> list[Completion]:
    """The responses of one rewarded group, in order.

    Args:
        lengths, stopped: per response, as the rollout told.
        names: of the reward functions, in the message's order.
        advantages: per response; none in an evaluation.
        spoken: the group's tokens, if they are to be kept.
    """
    tokens: list[dict[str, Any]] = [{}] * len(lengths) if spoken is None else _tokens(spoken, lengths)
    rewards = _doubles(message.rewards)
    by_function = [_doubles(blob) for blob in message.by_function]
    return [
        Completion(
            source=source,
            step=message.step,
            version=version,
            row=row,
            group=group,
            sample=sample,
            completion=text,
            reward=rewards[sample],
            rewards={name: values[sample] for name, values in zip(names, by_function, strict=True)},
            advantage=advantages[sample] if advantages else math.nan,
            tokens=lengths[sample],
            stopped=stopped[sample],
            **tokens[sample],
        )
        for sample, text in enumerate(message.texts)
    ]


def lines(completions: Iterable[Completion]) -> bytes:
    """JSON lines in UTF-8, each one line for every reader. Characters that UTF-8 cannot carry become backslash
    escapes."""
    text = b"".join(_encode(completion) + b"\n" for completion in completions)
    for raw, escaped in _LINE_ENDS:
        text = text.replace(raw, escaped)
    return text


def _tokens(spoken: Spoken, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """ids, logprobs and trainer_logprobs of each response."""
    ends = list(itertools.accumulate(lengths))
    parts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    ids = struct.unpack(f"<{len(spoken.tokens.tokens) // 4}i", spoken.tokens.tokens)
    rollout, trainer = _doubles(spoken.rollout.values), _doubles(spoken.trainer.values)
    return [{"ids": ids[part], "logprobs": rollout[part], "trainer_logprobs": trainer[part]} for part in parts]


def _encode(completion: Completion) -> bytes:
    try:
        return msgspec.json.encode(completion)
    except UnicodeEncodeError:
        return msgspec.json.encode(
            {name: _sendable(value) for name, value in msgspec.structs.asdict(completion).items() if value is not UNSET}
        )


def _sendable(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _doubles(blob: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(blob) // 8}d", blob)
