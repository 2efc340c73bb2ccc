"""A transformers model whose parameters and gradients are views on given storage.

Owns: making the module tree without allocating parameters, pointing them at views, gradients likewise, ties, and our
attention functions. Does not know: segments, who filled the weights, or who else maps them.

Two kinds of tree over the same storage: ours, for the split passes, and a plain one, whose every computation is
transformers' own (`rollplex.model.whole`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.errors import ModelError
from rollplex.layout.parameters import ParameterTable, gradient_table
from rollplex.layout.shape import read_architecture
from rollplex.layout.vision import Architecture
from rollplex.memory.tensors import hf_views
from rollplex.model.attention import TEXT_ATTENTION
from rollplex.model.fused import fuse
from rollplex.model.head import OutputLayer
from rollplex.model.vision import VISION_ATTENTION, PatchProjection

Model: TypeAlias = Qwen2_5_VLForConditionalGeneration
"""Or a Qwen2VLForConditionalGeneration, whose tree has the same names down to the blocks of the vision tower."""
CLASSES: Mapping[Architecture, tuple[str, str]] = {
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration"),
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration"),
}
"""Configuration and model in transformers, which imports what is asked for."""
LM_HEAD = "lm_head.weight"
PLAIN_ATTENTION = "sdpa"


def build(
    folder: Path,
    table: ParameterTable,
    views: Mapping[str, Tensor],
    *,
    gradients: Mapping[str, Tensor] | None,
    freeze_vision: bool,
    plain: bool = False,
    fused: bool | None = None,
) -> Model:
    """Builds the model of a folder over existing storage; nothing is copied and no weight file is read.

    Args:
        folder: with config.json.
        table: of the stored parameters; its entries' pieces name transformers' parameters.
        views: stored name -> tensor of the stored shape, for every entry.
        gradients: stored name -> tensor, for every trainable entry. Each parameter's .grad becomes a view on it,
            so that a backward adds in place. None: no parameter needs a gradient.
        freeze_vision: must be what the table was made with.
        plain: keep transformers' attention, patch embedding and output layer.
        fused: run `rollplex.model.fused` instead of transformers' modules. None: on a GPU in bfloat16.

    Returns:
        transformers' model in evaluation mode (no dropout) on the device of the views. Use it through
        `rollplex.model.prefix`, `suffix` and `decode`: its own forward has no attention without their contexts. A plain
        one is for `rollplex.model.whole`, and has no other.

    Raises:
        ModelError: an architecture outside what this runs, or a parameter without a view of its shape.
    """
    if freeze_vision == any(e.trainable for e in table.entries if e.tower == "vision"):
        raise AssertionError("the parameter table was made for the other setting of freeze_vision")
    model = without_storage(folder)
    grads = {} if gradients is None else hf_views(gradients, gradient_table(table))
    _point(model, hf_views(views, table), grads, folder)
    if not plain:
        old: Any = model.lm_head
        head: Any = OutputLayer(old.weight)
        model.lm_head = head
    make_ready(model, next(iter(views.values())).device, plain=plain)
    if not plain and (runs_fused(next(iter(views.values()))) if fused is None else fused):
        fuse(model, views, gradients)
        model.train(False)  # the modules that it has put in as well
    return model


def without_storage(folder: Path) -> Model:
    """The module tree of a folder on torch's meta device. Raises ModelError as `build`."""
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[read_architecture(folder)])
    config = _config(config_class, folder)
    with torch.device("meta"):
        model: Model = model_class(config)
    return model


def make_ready(model: Model, device: torch.device, *, plain: bool = False) -> None:
    """What is left to do when every parameter has its storage: rotary tables, attention, patch embedding, no dropout.

    Raises:
        ModelError: a tensor without storage.
    """
    _make_rotary(model, device)
    text, vision = (PLAIN_ATTENTION, PLAIN_ATTENTION) if plain else (TEXT_ATTENTION, VISION_ATTENTION)
    model.model.language_model.config._attn_implementation = text  # noqa: SLF001 - transformers' own setting
    model.model.visual.config._attn_implementation = vision  # noqa: SLF001
    if not plain:
        embed: Any = model.model.visual.patch_embed
        embed.proj = PatchProjection(embed.proj.weight)
    model.train(False)


def runs_fused(weight: Tensor) -> bool:
    """Whether a model over such weights runs `rollplex.model.fused` by default."""
    return weight.is_cuda and weight.dtype == torch.bfloat16


def _config(config_class: Any, folder: Path) -> Any:
    try:
        config = config_class.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError("config.json cannot be read", got=str(error), where=str(folder)) from error
    kinds = set(config.text_config.layer_types)
    if kinds != {"full_attention"}:
        raise ModelError(
            "a layer's attention is not implemented",
            got=", ".join(sorted(kinds)),
            needed="full_attention in every layer",
            do="Set use_sliding_window to false in config.json if the model was trained so.",
            where=str(folder),
        )
    return config


def _point(model: Model, views: Mapping[str, Tensor], grads: Mapping[str, Tensor], folder: Path) -> None:
    """Replaces every parameter by one over its view; ties stay ties."""
    tied = model.config.tie_word_embeddings
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        if tied and name == LM_HEAD:
            continue
        view = views.get(name)
        if view is None or view.shape != old.shape:
            raise ModelError(
                "a parameter has no storage of its shape",
                got="none" if view is None else f"{tuple(view.shape)}",
                needed=f"{tuple(old.shape)}",
                do="Make the parameter table from the same folder.",
                where=f"{folder}: {name}",
            )
        assign(model, name, parameter_over(view, grads.get(name)))
    if tied:
        model.lm_head.weight = model.model.language_model.embed_tokens.weight


def parameter_over(view: Tensor, grad: Tensor | None) -> nn.Parameter:
    """A parameter whose memory is the view's; a backward adds into `grad`. None: it needs no gradient."""
    parameter = nn.Parameter(view, requires_grad=grad is not None)
    if grad is not None:
        parameter.grad = grad
        if not grad.is_contiguous():
            _use_up_layout_warning()
    return parameter


@lru_cache(maxsize=1)
def _use_up_layout_warning() -> None:
    """Spends torch's once-per-process warning that a gradient which is not contiguous may be slow to add to.

    It fires for the padded down_proj of the vision tower, whose rows lie further apart than they are long: on
    purpose.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameter = nn.Parameter(torch.zeros(2, 2)[:, :1])
        parameter.grad = torch.zeros(2, 2)[:, :1]
        parameter.sum().backward()  # type: ignore[no-untyped-call]


def assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts it in the place of the parameter with that name."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)


def _make_rotary(model: Model, device: torch.device) -> None:
    """Makes the rotary modules anew off the meta device: their frequencies are computed, in float32, not loaded."""
    text: Any = model.model.language_model
    text.rotary_emb = type(text.rotary_emb)(config=text.config).to(device)
    visual: Any = model.model.visual
    old = visual.rotary_pos_emb
    new = type(old)(old.config) if hasattr(old, "config") else type(old)(old.dim, old.theta)
    visual.rotary_pos_emb = new.to(device)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError("a tensor of the model was left without storage", where=name)
