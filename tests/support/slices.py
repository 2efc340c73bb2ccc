"""What each rank of a layout holds, cut from full tensors: the rules of SGLang 0.5.17 and of PyTorch, written down a
second time and without any place in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parameters import parameter_table
from rollplex.layout.published import QWEN2_5_VL
from rollplex.layout.shape import ModelShape

DEGREES = (1, 2, 4, 8)
Array: TypeAlias = NDArray[Any]
Model: TypeAlias = dict[str, Array]
"""By transformers' names."""


def small_shape(**text: Any) -> ModelShape:
    """8 heads of 4, 2 K/V heads; every degree up to 8 is possible."""
    vision = {"depth": 1, "hidden": 32, "heads": 8, "intermediate": 45, "out_hidden": 6, "patch": 2}
    tower = replace(QWEN2_5_VL["3B"].vision, **{**vision, **text.pop("vision", {})})
    numbers = {"hidden": 6, "layers": 1, "heads": 8, "kv_heads": 2, "head_dim": 4, "intermediate": 16, "vocab": 70}
    return replace(QWEN2_5_VL["3B"], vision=tower, **{**numbers, **text})


def full_model(shape: ModelShape, dtype: str) -> Model:
    """Every parameter, each number different from its neighbours and none zero."""
    item = {"bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}[dtype]
    model: Model = {}
    start = 0
    for entry in parameter_table(shape, dtype=dtype, freeze_vision=False).entries:
        for piece in entry.pieces:
            size = int(np.prod(piece.hf_shape))
            numbers = np.arange(start, start + size, dtype=np.uint64) * 7919 % 65521 + 1
            model[piece.hf_name] = numbers.astype(item).reshape(piece.hf_shape)
            start += size
    return model


def sampled(model: Model, shape: ModelShape, layout: RolloutLayout, rank: int) -> Model:
    """By SGLang's names, as its weight loaders would fill one rank."""
    vision_ranks, vision_rank = (layout.degree, rank) if layout.vision_sharded else (1, 0)
    return {
        **dict(_text(model, shape, layout.degree, rank)),
        **dict(_vision(model, shape, vision_ranks, vision_rank)),
    }


def trained(model: Model, shape: ModelShape, layout: TrainingLayout, rank: int) -> Model:
    """By the names of parts: even chunks, as torch.chunk makes them."""
    vision = (layout.degree, rank) if layout.vision_sharded else (1, 0)
    held: Model = {}
    for name, value in model.items():
        ranks, own = vision if name.startswith("model.visual.") else (layout.degree, rank)
        axis = _training_axis(name, value)
        if name.startswith("model.visual.") and ".attn.qkv." in name:
            for label, third in zip("qkv", np.split(value, 3), strict=True):
                held[f"{name}:{label}"] = _chunk(third, axis, ranks, own)
            continue
        whole = _padded_as_stored(name, value, shape) if layout.padding_sharded else value
        held[name] = whole if axis is None else _chunk(whole, axis, ranks, own)
    return held


def _training_axis(name: str, value: Array) -> int | None:
    parts = name.split(".")
    module, kind = parts[-2], parts[-1]
    merger = ".merger.mlp." in name
    if module in {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv", "fc1", "embed_tokens", "lm_head"}:
        return 0
    if merger and module == "0":
        return 0
    second = module in {"o_proj", "down_proj", "fc2"} or (module == "proj" and "attn" in parts) or merger
    return 1 if second and kind == "weight" else None


def _padded_as_stored(name: str, value: Array, shape: ModelShape) -> Array:
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return _up(value, 0, 64)
    if ".visual.blocks." in name and shape.architecture == "qwen2_5_vl" and ".mlp." in name:
        if ".down_proj.weight" in name:
            return _up(value, 1, 8)
        if ".down_proj." not in name:
            return _up(value, 0, 8)
    return value


def _chunk(value: Array, axis: int | None, ranks: int, rank: int) -> Array:
    assert axis is not None
    places = torch.arange(value.shape[axis]).chunk(ranks)
    taken = places[rank].numpy() if rank < len(places) else np.arange(0)
    return np.take(value, taken, axis)


def _up(value: Array, axis: int, multiple: int) -> Array:
    missing = [(0, 0)] * value.ndim
    missing[axis] = (0, -value.shape[axis] % multiple)
    return np.pad(value, missing)


def _even(value: Array, axis: int, ranks: int, rank: int) -> Array:
    return np.split(value, ranks, axis)[rank]


def _heads(value: Array, heads: int, ranks: int, rank: int) -> Array:
    """Of q, k or v: so many heads for each rank, or one that several ranks have."""
    by_head = np.split(value, heads, 0)
    if ranks > heads:
        return by_head[rank // (ranks // heads)]
    each = heads // ranks
    return np.concatenate(by_head[rank * each : (rank + 1) * each])


def _text(model: Model, shape: ModelShape, ranks: int, rank: int) -> Iterator[tuple[str, Array]]:
    hf = "model.language_model"
    yield "model.embed_tokens.weight", _even(_up(model[f"{hf}.embed_tokens.weight"], 0, 64), 0, ranks, rank)
    if not shape.tied:
        yield "lm_head.weight", _even(_up(model["lm_head.weight"], 0, 64), 0, ranks, rank)
    yield "model.norm.weight", model[f"{hf}.norm.weight"]
    for n in range(shape.layers):
        to, of = f"model.layers.{n}", f"{hf}.layers.{n}"
        for kind in ("weight", "bias"):
            heads = (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
            qkv = [_heads(model[f"{of}.self_attn.{h}_proj.{kind}"], count, ranks, rank) for h, count in heads]
            yield f"{to}.self_attn.qkv_proj.{kind}", np.concatenate(qkv)
        yield f"{to}.self_attn.o_proj.weight", _even(model[f"{of}.self_attn.o_proj.weight"], 1, ranks, rank)
        gate_up = [_even(model[f"{of}.mlp.{p}_proj.weight"], 0, ranks, rank) for p in ("gate", "up")]
        yield f"{to}.mlp.gate_up_proj.weight", np.concatenate(gate_up)
        yield f"{to}.mlp.down_proj.weight", _even(model[f"{of}.mlp.down_proj.weight"], 1, ranks, rank)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield f"{to}.{norm}", model[f"{of}.{norm}"]


def _vision(model: Model, shape: ModelShape, ranks: int, rank: int) -> Iterator[tuple[str, Array]]:
    for name, value in model.items():
        if not name.startswith("model.visual."):
            continue
        to = name.removeprefix("model.")
        if ".attn.qkv." in name:
            thirds = [_heads(third, shape.vision.heads, ranks, rank) for third in np.split(value, 3)]
            yield to.replace(".qkv.", ".qkv_proj."), np.concatenate(thirds)
        elif ".gate_proj." in name:
            both = [_up(model[name.replace("gate_proj", p)], 0, 8) for p in ("gate_proj", "up_proj")]
            yield to.replace("gate_proj", "gate_up_proj"), np.concatenate([_even(v, 0, ranks, rank) for v in both])
        elif ".up_proj." not in name:
            yield to, _vision_rest(name, value, shape, ranks, rank)


def _vision_rest(name: str, value: Array, shape: ModelShape, ranks: int, rank: int) -> Array:
    if name.endswith(("mlp.0.weight", "mlp.0.bias", "fc1.weight", "fc1.bias")):
        return _even(value, 0, ranks, rank)
    if name.endswith("mlp.down_proj.weight"):
        return _even(_up(value, 1, 8), 1, ranks, rank)
    if name.endswith(("attn.proj.weight", "fc2.weight", "merger.mlp.2.weight")):
        return _even(value, 1, ranks, rank)
    return value
