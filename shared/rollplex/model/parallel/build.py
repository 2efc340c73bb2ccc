"""A transformers model over one rank's shards: what `rollplex.model.build` is for whole weights.

    q, k, v, gate, up      by output features (a vision tower's q|k|v as three)
    o, down, merger's 2nd  by input features, summed over the ranks; their biases whole
    embedding, lm_head     by rows of the padded vocabulary
    norms, patch embedding whole on every rank

One sum over ranks for each pair of matrices in the forward, one in the backward. The collectives are our own
(`rollplex.model.parallel.group`): docs/decisions/0015 says why. Owns: which module is split how. Does not know: where
the views come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rollplex.errors import ModelError
from rollplex.layout.parallel.degrees import TrainingLayout
from rollplex.layout.parallel.kv import rank_shape
from rollplex.layout.parallel.plan import Parameter
from rollplex.layout.shape import ModelShape
from rollplex.model.build import LM_HEAD, Model, assign, make_ready, parameter_over, runs_fused, without_storage
from rollplex.model.fused.ranks import fuse_rank
from rollplex.model.parallel.group import TensorGroup, copied
from rollplex.model.parallel.modules import PartedLinear, ShardedEmbedding, ShardedHead, SummedLinear
from rollplex.model.parallel.vocabulary import VocabularyShard

EMBEDDING = "model.language_model.embed_tokens.weight"


def build_parallel(
    folder: Path,
    shape: ModelShape,
    layout: TrainingLayout,
    parameters: Mapping[str, Parameter],
    views: Mapping[str, Tensor],
    *,
    gradients: Mapping[str, Tensor] | None,
    group: TensorGroup,
    fused: bool | None = None,
) -> Model:
    """Builds one rank's model over existing storage; nothing is copied or sent, and no weight file is read.

    Args:
        folder: with config.json.
        shape: of the whole model.
        layout: of the training; its degree is the group's size.
        parameters: this rank's (`DevicePlan.training`), by name. Those of a rollout's rank
            (`rollplex.layout.parallel.parts`) have whole K/V heads also where there are more ranks than heads: without
            gradients it makes no difference that several ranks have the same one.
        views: for each of them a tensor of its shape (`rollplex.model.parallel.views`).
        gradients: the same for each that is trained: its .grad, so that a backward adds in place. None: no parameter
            needs a gradient.
        group: its process group's timeout is the deadline of every collective.
        fused: run `rollplex.model.fused.ranks` instead of transformers' modules. None: on a GPU in bfloat16.

    Returns:
        As `rollplex.model.build.build`, for the same passes. K and V have this rank's heads alone; hidden states and
        log-probabilities, and their gradients, are the same on every rank. All ranks must be given the same batches.

    Raises:
        ConfigError: a rank has a part of a K/V head.
        ModelError: a parameter without a view of its shape.
    """
    if group.size != layout.degree or not layout.padding_sharded:
        raise AssertionError(f"{group} for {layout}: needed its degree, and padding sharded")
    for name, parameter in parameters.items():
        _check(views.get(name), parameter, folder)
        if name.endswith(".self_attn.k_proj.weight") and parameter.shape[0] % shape.head_dim:
            rank_shape(shape, layout.degree)  # raises
    grads = gradients or {}
    model = without_storage(folder)
    visual: Any = model.model.visual
    for block in visual.blocks:
        block.attn.qkv = PartedLinear(block.attn.qkv)
        if layout.vision_sharded:
            block.attn.num_heads = shape.vision.heads // layout.degree
    made = {name: parameter_over(views[name], grads.get(name)) for name in parameters}
    for name in parameters.keys() - {EMBEDDING, LM_HEAD}:
        assign(model, _place(name), made[name])
    _join_pairs(model, layout, parameters, group)
    first, stop = parameters[EMBEDDING].pieces[0].of
    shard = VocabularyShard(group=group, first=first, rows=stop - first, vocab=shape.vocab)
    _split_vocabulary(model, shard, made[EMBEDDING], made.get(LM_HEAD))
    some = next(iter(views.values()))
    make_ready(model, some.device)
    if runs_fused(some) if fused is None else fused:
        fuse_rank(model, group, vision_sharded=layout.vision_sharded)
        model.train(False)  # the modules that it has put in as well
    return model


def _place(name: str) -> str:
    """Of a part in the module tree: `attn.qkv.weight:q` is `attn.qkv.q.weight`."""
    path, _, label = name.partition(":")
    owner, _, leaf = path.rpartition(".")
    return f"{owner}.{label}.{leaf}" if label else path


def _check(view: Tensor | None, parameter: Parameter, folder: Path) -> None:
    if view is None or view.shape != parameter.shape:
        raise ModelError(
            "a parameter has no storage of its shape",
            got="none" if view is None else f"{tuple(view.shape)}",
            needed=f"{parameter.shape}, this rank's shard",
            do="Make the plan from the same folder, and the views from the same device of it.",
            where=f"{folder}: {parameter.name}",
        )


def _join_pairs(model: Model, layout: TrainingLayout, parameters: Mapping[str, Parameter], group: TensorGroup) -> None:
    """Puts the collectives around each pair of matrices: in front of its module, and behind its second matrix."""
    language_model: Any = model.model.language_model
    visual: Any = model.model.visual
    pairs = [pair for layer in language_model.layers for pair in (layer.self_attn, layer.mlp)]
    if layout.vision_sharded:
        pairs += [pair for block in visual.blocks for pair in (block.attn, block.mlp)] + [visual.merger.mlp]
    for pair in pairs:
        pair.register_forward_pre_hook(_CopiedInput(group), with_kwargs=True)
    for name, parameter in parameters.items():
        split = parameter.stored.split
        if split.axis == "columns" and (layout.vision_sharded or split.entry.tower == "text"):
            path = name.removesuffix(".weight")
            model.set_submodule(path, SummedLinear(model.get_submodule(path), group))


class _CopiedInput:
    """Before q, k and v, or gate and up, read the hidden states: their gradients are summed together, not each."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:  # transformers' MLPs and vision attention
            return (copied(args[0], self._group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": copied(kwargs["hidden_states"], self._group)}


def _split_vocabulary(model: Model, shard: VocabularyShard, embedding: nn.Parameter, head: nn.Parameter | None) -> None:
    """Embedding and output layer. head: None if it is the embedding's matrix."""
    language_model: Any = model.model.language_model
    language_model.embed_tokens = ShardedEmbedding(embedding, shard, language_model.padding_idx)
    sharded: Any = ShardedHead(embedding if head is None else head, shard)
    model.lm_head = sharded
