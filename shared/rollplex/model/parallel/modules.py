"""Modules that take the place of transformers' where plain ones over smaller matrices would compute something else.

Owns: what is added once to a sum over ranks, products of row ranges that lie apart, a vocabulary in parts. Does not
know: which module of the model is which, storage.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from rollplex.model.head import output_logits
from rollplex.model.parallel.group import TensorGroup, summed
from rollplex.model.parallel.vocabulary import VocabularyShard


class SummedLinear(nn.Module):
    """Split by input features: [..., in / ranks] -> [..., out]. The bias is whole, and added once, to the sum."""

    def __init__(self, old: nn.Module, group: TensorGroup) -> None:
        """old: a linear module, whose parameters are taken: weight [out, in / ranks], bias [out] or None."""
        super().__init__()
        source: Any = old
        self.weight: nn.Parameter = source.weight
        self.bias: nn.Parameter | None = source.bias
        self.group = group

    def forward(self, inputs: Tensor) -> Tensor:
        out = summed(F.linear(inputs, self.weight), self.group)
        return out if self.bias is None else out + self.bias


class PartedLinear(nn.Module):
    """q, k and v of a layer that transformers has as one product: [..., in] -> [..., 3 * out / ranks].

    A rank's rows of the three are no range of the whole, and lie apart in storage that rollout has more of.
    """

    def __init__(self, old: nn.Linear) -> None:
        """old: of the whole [3 * out, in]; only its sizes are taken."""
        super().__init__()
        width, out = old.in_features, old.out_features // 3
        self.q, self.k, self.v = (nn.Linear(width, out, device="meta") for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.q(inputs), self.k(inputs), self.v(inputs)], -1)


class ShardedEmbedding(nn.Module):
    """Each rank looks up the ids that it has; the others give zeros, so that the sum is exact."""

    def __init__(self, weight: nn.Parameter, shard: VocabularyShard, padding_id: int | None) -> None:
        """weight: [rows of the shard, hidden]. padding_id: its row gets no gradient (transformers' padding_idx)."""
        super().__init__()
        self.weight, self.shard = weight, shard
        local = -1 if padding_id is None else padding_id - shard.first
        self.padding_row = local if 0 <= local < shard.rows else None

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., hidden]."""
        rows, mine = self.shard.here(ids)
        found = F.embedding(rows, self.weight, padding_idx=self.padding_row)
        return summed(found.masked_fill(~mine[..., None], 0), self.shard.group)


class ShardedHead(nn.Module):
    """The output layer. Log-probabilities are made from its `weight` and `shard` (`rollplex.model.logprob`)."""

    def __init__(self, weight: nn.Parameter, shard: VocabularyShard) -> None:
        """weight: [rows of the shard, hidden]."""
        super().__init__()
        self.weight, self.shard = weight, shard

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> logits [..., vocabulary] of all ranks, padding cut off; for decoding, without gradients."""
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise AssertionError("logits of a sharded vocabulary have no gradient: use token_logprobs")
        return torch.cat(self.shard.group.gather(output_logits(hidden, self.weight)), -1)[..., : self.shard.vocab]


def vocabulary_shard(head: nn.Module) -> VocabularyShard | None:
    """Of a model's output layer; None if all of the vocabulary is here."""
    return head.shard if isinstance(head, ShardedHead) else None
