"""A vocabulary that is split over ranks by its rows: which ids are here, and one softmax over all of them.

Owns: the ids of a rank's rows, padding left out, and how sums over a part of the vocabulary become those over all of
it. Does not know: how logits are made, what else is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollplex.model.parallel.group import TensorGroup


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """Rows `first` to `first + rows` of the padded vocabulary; ids from `vocab` on are padding."""

    group: TensorGroup
    first: int
    rows: int
    vocab: int

    def here(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """For ids of any shape: their rows in this shard (0 where they are elsewhere), and which are in it."""
        local = ids - self.first
        mine = (local >= 0) & (local < self.rows)
        return local.where(mine, torch.zeros_like(local)), mine

    def left_out(self, forbidden: Tensor) -> Tensor:
        """Rows of this shard outside every softmax: those of the ids `forbidden`, and padding. int64 [n]."""
        local, mine = self.here(forbidden)
        padding = range(max(0, self.vocab - self.first), self.rows)
        return torch.cat([local[mine], torch.tensor(padding, dtype=torch.int64, device=forbidden.device)])

    def joined(self, picked: Tensor, norm: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over this shard become those over the whole vocabulary, the same on every rank.

        With Z = sum of e^norm_r over the ranks r, the log-sum-exp is log Z, and by the chain rule of entropy
        H = log Z + sum of (e^norm_r / Z) (H_r - norm_r). Two collectives.

        Args:
            picked: [K] logits of given tokens, 0 where they are elsewhere.
            norm: [N] log-sum-exp.
            entropies: [N], or [0] if they are not wanted.
        """
        largest = self.group.largest(norm.clone())
        weight = (norm - largest).exp()
        parts = [picked, weight]
        if entropies.numel():
            parts.append(weight * (entropies - (norm - largest)))
        sums = torch.split(self.group.add(torch.cat(parts)), [len(part) for part in parts])
        log_weight = sums[1].log()
        return sums[0], largest + log_weight, log_weight + sums[2] / sums[1] if len(sums) > 2 else entropies
