"""The slow path that the fast one is held to: prompt and response in one forward of the plain transformers model.

Owns: handing one whole sequence to transformers as it wants it, and log-probabilities written out as the definition
says (`rollplex.model.logprob`). No split, no shared prefix, no cache, no attention, positions, patch embedding or
log-softmax of ours: with the split passes it has the weights and the pixel rows in common, and nothing that computes.
Does not know: losses, groups, segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollplex.memory.predict import LOGITS_CHUNK_BYTES
from rollplex.model.attention import softmax_dtype
from rollplex.model.batch import PromptBatch
from rollplex.model.build import Model
from rollplex.model.head import output_logits

TEXT, IMAGE, VIDEO = 0, 1, 2
"""transformers' mm_token_type_ids."""


def whole_forward(
    model: Model,
    prompt: PromptBatch,
    response: Tensor,
    *,
    temperature: float,
    never_sampled: Sequence[int],
    chunk_bytes: int = LOGITS_CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of one response. Keeps a graph if gradients are enabled.

    Positions are transformers' own, from ids and grids. Only with a video they are the prompt's, because the seconds
    between its frames are known to the input child alone.

    Args:
        model: from `build(..., plain=True)`.
        prompt: one row.
        response: int64 [R], at least one token, none of them in `never_sampled`.
        chunk_bytes: logits are made for so many tokens at a time that one copy in float32 (float64) takes at most this;
            the backward makes them again.

    Returns:
        Both [R], float32 (float64 if the model is).
    """
    return _logprobs(
        model.lm_head.weight,
        whole_hidden(model, prompt, response),
        response,
        temperature=temperature,
        never_sampled=never_sampled,
        chunk_bytes=chunk_bytes,
    )


def whole_hidden(model: Model, prompt: PromptBatch, response: Tensor) -> Tensor:
    """Hidden states [R, hidden] after the final norm, each of which predicts a token of the response: what
    `whole_forward` makes log-probabilities of, with its arguments."""
    if prompt.rows != 1:
        raise AssertionError(f"one sequence at a time; got {prompt.rows} prompts")
    length = int(prompt.lengths[0])
    ids = torch.cat([prompt.ids[0, :length], response])
    kinds = _kinds(model, ids)
    model.model.rope_deltas = None
    hidden: Tensor = model.model(
        input_ids=ids[None],
        mm_token_type_ids=kinds[None],
        position_ids=_positions(prompt, kinds, len(response)),
        use_cache=False,
        **_media(model, prompt, kinds[:length]),
    ).last_hidden_state[0, length - 1 : -1]
    return hidden


def _kinds(model: Model, ids: Tensor) -> Tensor:
    kinds = torch.full_like(ids, TEXT, dtype=torch.int32)
    kinds[ids == model.config.image_token_id] = IMAGE
    kinds[ids == model.config.video_token_id] = VIDEO
    return kinds


def _positions(prompt: PromptBatch, kinds: Tensor, new: int) -> Tensor | None:
    """[3, 1, P + R], or None: transformers finds them."""
    if not bool((kinds == VIDEO).any()):
        return None
    ahead = prompt.next_positions[0] + torch.arange(new, device=kinds.device)
    return torch.cat([prompt.positions[:, 0, : int(prompt.lengths[0])], ahead.expand(3, -1)], 1)[:, None]


def _media(model: Model, prompt: PromptBatch, kinds: Tensor) -> dict[str, Tensor]:
    """transformers' arguments: images and videos apart, each in order."""
    if prompt.pixel_rows is None:
        return {}
    visual: Any = model.model.visual
    placeholders = kinds[kinds != TEXT].tolist()
    pixels: dict[int, list[Tensor]] = {IMAGE: [], VIDEO: []}
    grids: dict[int, list[tuple[int, int, int]]] = {IMAGE: [], VIDEO: []}
    row = token = 0
    for grid in prompt.grids:
        rows = grid[0] * grid[1] * grid[2]
        kind = placeholders[token]
        pixels[kind].append(prompt.pixel_rows[row : row + rows])
        grids[kind].append(grid)
        row, token = row + rows, token + rows // visual.spatial_merge_size**2
    names = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
    out: dict[str, Tensor] = {}
    for kind, (values, places) in names.items():
        if grids[kind]:
            out[values] = torch.cat(pixels[kind])
            out[places] = torch.tensor(grids[kind], device=kinds.device)
    return out


def _logprobs(
    weight: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    never_sampled: Sequence[int],
    chunk_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Of the tokens [R] that the hidden states [R, hidden] predict."""
    keep = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    keep[[i for i in never_sampled if i < len(keep)]] = False
    allowed, places = keep.nonzero().squeeze(1), keep.cumsum(0) - 1

    def part(rows: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        logits = output_logits(rows, weight).index_select(-1, allowed)
        logp = torch.log_softmax(logits.to(softmax_dtype(weight.dtype)) / temperature, -1)
        return logp.gather(1, picked[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)

    size = max(1, chunk_bytes // (weight.shape[0] * softmax_dtype(weight.dtype).itemsize))
    parts = [
        checkpoint(part, hidden[start : start + size], places[tokens[start : start + size]], use_reentrant=False)
        for start in range(0, len(tokens), size)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])
