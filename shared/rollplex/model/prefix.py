"""The prefix pass: vision tower and prompt tokens, once per prompt.

Owns: the prefix forward, the state that it exports (per-layer K after rope and V, the last hidden state) and the prefix
backward. Does not know: responses, losses, where K/V are kept, or which process holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rollplex.errors import DataError
from rollplex.memory.tensors import KvViews
from rollplex.model.attention import NO_MASK, PrefixContext
from rollplex.model.batch import PromptBatch
from rollplex.model.build import Model
from rollplex.model.layers import inputs_kept
from rollplex.model.vision import vision_features


@dataclass(kw_only=True)
class PrefixState:
    """What the suffix of a prompt needs from it.

    keys, values: per layer [B, kv, P, D], K after rope; right-padded, padded entries are finite and meaningless.
    last_hidden: [B, hidden], after the final norm, at each prompt's last token: predicts response token 0.
    lengths: int64 [B]. next_positions: int64 [B], mrope position of response token 0 in all three rows.

    A trainer builds one from leaves over the K/V segment: tensors with requires_grad whose .grad are views too.
    """

    keys: list[Tensor]
    values: list[Tensor]
    last_hidden: Tensor
    lengths: Tensor
    next_positions: Tensor

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def size_bytes(self) -> int:
        """Of K, V and the last hidden state themselves, without any graph."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values, self.last_hidden))

    def select(self, rows: slice) -> PrefixState:
        """The state of some of the prompts, as views."""
        return PrefixState(
            keys=[key[rows] for key in self.keys],
            values=[value[rows] for value in self.values],
            last_hidden=self.last_hidden[rows],
            lengths=self.lengths[rows],
            next_positions=self.next_positions[rows],
        )


def prefix_forward(
    model: Model, batch: PromptBatch, *, grad: bool, layers: bool = False, into: KvViews | None = None
) -> PrefixState:
    """Runs the prompts once, together.

    Args:
        model: from `rollplex.model.build`.
        batch: B prompts, right-padded to P tokens.
        grad: keep the autograd graph for `prefix_backward`. Without it K and V are contiguous and nothing else is held.
        layers: keep the inputs of the layers only; each runs again in the backward. Only with `grad`.
        into: a unit's segment to write K, V and the last hidden state to, layer by layer; the state that is returned is
            made of views of it. Only without `grad`: a graph must not look at what others write.

    Raises:
        DataError: the placeholders in the ids are not as many as the media's features.
    """
    if grad and into is not None:
        raise AssertionError("a graph over a segment: export the state instead")
    context = PrefixContext(graph=grad, again=layers, into=None if into is None else (into.keys, into.values))
    with nullcontext() if grad else torch.no_grad(), inputs_kept(model) if layers else nullcontext():
        embeds = _embed(model, batch)
        hidden = model.model.language_model(
            inputs_embeds=embeds,
            attention_mask=NO_MASK,
            position_ids=batch.positions,
            use_cache=False,
            rollplex=context,
        ).last_hidden_state
        last_hidden = hidden[torch.arange(batch.rows, device=hidden.device), batch.lengths - 1]
        if into is not None:
            last_hidden = into.last_hidden.copy_(last_hidden)
    return PrefixState(
        keys=context.keys,
        values=context.values,
        last_hidden=last_hidden,
        lengths=batch.lengths,
        next_positions=batch.next_positions,
    )


def prefix_backward(
    state: PrefixState, d_keys: Sequence[Tensor], d_values: Sequence[Tensor], d_last_hidden: Tensor
) -> None:
    """Backward of a `prefix_forward(..., grad=True)`; adds into the parameters' .grad and frees the graph.

    Args:
        state: as returned by the forward.
        d_keys, d_values: per layer [B, kv, P, D], summed over all responses; 0 at padding.
        d_last_hidden: [B, hidden].
    """
    outputs = [*state.keys, *state.values, state.last_hidden]
    torch.autograd.backward(outputs, [*d_keys, *d_values, d_last_hidden])


def export_state(state: PrefixState, kv: KvViews) -> None:
    """Copies K, V and the last hidden state into a unit's segment. The graph, if any, stays with `state`."""
    with torch.no_grad():
        for to, source in zip(kv.keys, state.keys, strict=True):
            to.copy_(source)
        for to, source in zip(kv.values, state.values, strict=True):
            to.copy_(source)
        kv.last_hidden.copy_(state.last_hidden)


def leaf_state(kv: KvViews, lengths: Tensor, next_positions: Tensor, rows: slice = slice(None)) -> PrefixState:
    """A prefix state for a trainer: leaves over a unit's segment, whose .grad are the segment's gradients.

    A backward through `suffix_forward` adds the gradients of K, V and the last hidden state there, in place.

    Args:
        kv: of the whole unit.
        lengths, next_positions: int64 [B] of the whole unit.
        rows: the prompts wanted, without a step.
    """

    def leaf(value: Tensor, grad: Tensor) -> Tensor:
        out = value[rows].detach().requires_grad_()
        out.grad = grad[rows]
        return out

    return PrefixState(
        keys=[leaf(value, grad) for value, grad in zip(kv.keys, kv.d_keys, strict=True)],
        values=[leaf(value, grad) for value, grad in zip(kv.values, kv.d_values, strict=True)],
        last_hidden=leaf(kv.last_hidden, kv.d_last_hidden),
        lengths=lengths[rows],
        next_positions=next_positions[rows],
    )


def _embed(model: Model, batch: PromptBatch) -> Tensor:
    """Token embeddings [B, P, hidden] with the media's features at their placeholders."""
    embeds: Tensor = model.model.language_model.embed_tokens(batch.ids)
    config = model.config
    real = torch.arange(batch.tokens, device=batch.ids.device) < batch.lengths[:, None]
    placeholders = ((batch.ids == config.image_token_id) | (batch.ids == config.video_token_id)) & real
    index = placeholders.flatten().nonzero().squeeze(1)
    if batch.pixel_rows is None:
        _check_features(index.shape[0], 0)
        return embeds
    frozen = not any(p.requires_grad for p in model.model.visual.parameters())
    with torch.no_grad() if frozen else nullcontext():
        features = vision_features(model.model.visual, batch.pixel_rows, batch.grids)
    _check_features(index.shape[0], features.shape[0])
    return embeds.flatten(0, 1).index_copy(0, index, features.to(embeds.dtype)).view(embeds.shape)


def _check_features(placeholders: int, features: int) -> None:
    if placeholders != features:
        raise DataError(
            "the prompts' media and their placeholder tokens do not match",
            got=f"{placeholders} placeholders, {features} features",
            needed="as many placeholders as t*h*w / merge**2 of the media",
        )
