"""One suffix unit, or the same groups as whole sequences, from the message to tensors.

Owns: reading rewards and log-probabilities off the wire, which rows of the prefix unit the groups are, and the checks
that everything in the message speaks of the same groups and samples. Does not know: the model, the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollplex.advantages import Float64s, GroupAdvantages, group_advantages
from rollplex.errors import ProtocolError
from rollplex.model.device import HOST
from rollplex.model.responses import join_values, response_batch
from rollplex.protocol.trainer import Algorithm, TrainSuffix, TrainWhole


@dataclass(frozen=True, kw_only=True)
class SuffixUnit:
    """All samples of the unit's groups, one row each, in order of group and sample. R: the longest response."""

    prefix_rows: slice
    """Of the prefix unit's segment; of whole sequences, their prompts."""
    tokens: Tensor
    """int64 [rows, R], right-padded."""
    lengths: Tensor
    """int64 [rows]."""
    rollout: Tensor
    """float64 [rows, R]: log-probabilities as sampled. For the metrics only, so it stays on the host."""
    reference: Tensor | None
    """float64 [rows, R]."""
    rewards: tuple[Float64s, ...]
    """Per group, float64 [G]; NaN for none."""
    groups: tuple[GroupAdvantages, ...]

    @property
    def advantages(self) -> Tensor:
        """float64 [rows]."""
        return self._per_row([group.values for group in self.groups])

    @property
    def weights(self) -> Tensor:
        """float64 [rows], 0 or 1."""
        return self._per_row([group.weights for group in self.groups])

    def _per_row(self, values: list[Float64s]) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(self.tokens.device)


def read_unit(
    message: TrainSuffix | TrainWhole, algorithm: Algorithm, vocab: int, *, device: torch.device = HOST
) -> SuffixUnit:
    """The unit of `message`, its tensors on `device`.

    Raises:
        ProtocolError: parts of the message disagree, a token is outside the vocabulary, or rewards cannot be used.
    """
    tokens, lengths = response_batch(message.responses)  # looked at here, then moved
    where = _where(message)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise ProtocolError(
            "A response holds a token outside the vocabulary",
            got=f"ids from {int(tokens.min())} to {int(tokens.max())}",
            needed=f"0 to {vocab - 1}",
            where=where,
        )
    if not message.reference_logprobs and algorithm.beta != 0.0:
        raise ProtocolError(
            "There are no reference log-probabilities",
            needed=f"those of all its groups, as beta is {algorithm.beta}",
            where=where,
        )
    rewards = _rewards(message)
    batch_rewards = _float64s(message.batch_rewards, "batch_rewards") if message.batch_rewards else None
    return SuffixUnit(
        prefix_rows=_prefix_rows(message) if isinstance(message, TrainSuffix) else _whole_rows(message),
        tokens=tokens.to(device),
        lengths=lengths.to(device),
        rollout=join_values(message.rollout_logprobs, message.responses),
        reference=(
            join_values(message.reference_logprobs, message.responses, device=device)
            if message.reference_logprobs
            else None
        ),
        rewards=rewards,
        groups=tuple(
            group_advantages(r, loss=algorithm.loss, scale=algorithm.scale_rewards, batch_rewards=batch_rewards)
            for r in rewards
        ),
    )


def _prefix_rows(message: TrainSuffix) -> slice:
    """Rows of the unit's groups in the prefix unit: `copies` per prompt, consecutive."""
    groups = [response.group for response in message.responses]
    known = [prompt.group for prompt in message.prompts]
    start = known.index(groups[0]) if groups[0] in known else 0
    if known[start : start + len(groups)] != groups:
        raise ProtocolError(
            "The groups of a suffix unit are no consecutive prompts of its prefix unit",
            got=str(groups),
            needed=f"a part of {known}",
            where=f"suffix unit {message.suffix_unit}",
        )
    samples = {len(response.lengths) for response in message.responses}
    if len(samples) != 1 or message.copies not in (1, *samples):
        raise ProtocolError(
            "The groups of a suffix unit do not fit the rows of its prefix unit",
            got=f"groups of {sorted(samples)} samples, {message.copies} copies of each prefix",
            needed="groups of one size, and 1 copy or one per sample",
            where=f"suffix unit {message.suffix_unit}",
        )
    return slice(start * message.copies, (start + len(groups)) * message.copies)


def _whole_rows(message: TrainWhole) -> slice:
    groups, known = [r.group for r in message.responses], [p.group for p in message.prompts]
    if groups != known:
        raise ProtocolError(
            "The groups of whole sequences are not those of their prompts",
            got=str(groups),
            needed=str(known),
            where=_where(message),
        )
    return slice(0, len(groups))


def _where(message: TrainSuffix | TrainWhole) -> str:
    whole = f"whole sequences of step {message.step}"
    return f"suffix unit {message.suffix_unit}" if isinstance(message, TrainSuffix) else whole


def _rewards(message: TrainSuffix | TrainWhole) -> tuple[Float64s, ...]:
    rewards = tuple(_float64s(blob, "rewards") for blob in message.rewards)
    if [r.size for r in rewards] != [len(response.lengths) for response in message.responses]:
        raise ProtocolError(
            "There are other rewards than samples",
            got=f"{[r.size for r in rewards]} rewards",
            needed=f"{[len(response.lengths) for response in message.responses]}",
            where=_where(message),
        )
    return rewards


def _float64s(blob: bytes, what: str) -> Float64s:
    if len(blob) % 8:
        raise ProtocolError(f"{what} are no float64 numbers", got=f"{len(blob)} bytes", needed="a multiple of 8")
    return np.frombuffer(blob, dtype="<f8").astype(np.float64)
