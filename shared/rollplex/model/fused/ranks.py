"""The fused modules of a tensor-parallel rank: those of `modules` over its shards, with a sum over the ranks in each.

    norm ─► q, k, v of its heads ─► rotation ─► attention ─► output projection ─► summed
    norm ─► its part of gate and up ─► gate ─► its part of down ─► summed (+ bias)

In the backward what the ranks have of the gradient of a norm's output is summed before it goes through the norm, as
`rollplex.model.parallel.group.copied` does it in front of transformers' modules. Shards lie apart where the storage is
that of another degree, so that a product of fused weights is one product for each part here, all into one result.

Owns: which modules of a rank's model are replaced. Does not know: kernels, storage, the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from rollplex.model.fused import ops
from rollplex.model.fused.modules import Attention, Norm, VisionHeads, merged_rotary
from rollplex.model.parallel.group import TensorGroup, summed


class NormedLinears(nn.Module):
    """The norm and a rank's parts of the linear layers over it, one behind the other."""

    def __init__(self, norm: Norm, layers: tuple[Any, ...], group: TensorGroup) -> None:
        """layers: linear modules, all with a bias or none."""
        super().__init__()
        self.norm = norm
        self.weights = nn.ParameterList([layer.weight for layer in layers])
        self.biases = nn.ParameterList([layer.bias for layer in layers if layer.bias is not None])
        self.add: Callable[[Tensor], object] | None = group.add if group.size > 1 else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., W] -> [..., sum of the widths]."""
        return ops.norm_linears(
            hidden, self.norm.weight, self.norm.eps, tuple(self.weights), biases=tuple(self.biases), add=self.add
        )


class RankMlp(nn.Module):
    """A rank's columns of gate, up and down."""

    def __init__(self, norm: nn.Module, old: nn.Module, group: TensorGroup) -> None:
        super().__init__()
        source: Any = old
        self.gate_up = NormedLinears(Norm(norm), (source.gate_proj, source.up_proj), group)
        self.down: nn.Parameter = source.down_proj.weight
        self.down_bias: nn.Parameter | None = source.down_proj.bias
        self.group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        out = summed(ops.gate_linear(self.gate_up(hidden), self.down, None), self.group)
        return out if self.down_bias is None else out + self.down_bias


class RankAttention(Attention):
    """A rank's heads of a text layer."""

    def __init__(self, norm: nn.Module, old: nn.Module, group: TensorGroup) -> None:
        source: Any = old
        heads, kv_heads = (len(part.weight) // source.head_dim for part in (source.q_proj, source.k_proj))
        super().__init__(norm, old, heads=heads, kv_heads=kv_heads)
        self.qkv = NormedLinears(self.norm, (source.q_proj, source.k_proj, source.v_proj), group)
        self.out: nn.Parameter = source.o_proj.weight
        self.group = group

    def projected(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.qkv(hidden)
        return out

    def merged(self, heads: Tensor) -> Tensor:
        return summed(F.linear(heads, self.out), self.group)


class RankVisionAttention(VisionHeads):
    """A rank's heads of the vision tower, whose q, k and v are three layers (`rollplex.model.parallel.modules`)."""

    def __init__(self, norm: nn.Module, old: nn.Module, group: TensorGroup) -> None:
        super().__init__(norm, old)
        source: Any = old
        self.qkv = NormedLinears(self.norm, (source.qkv.q, source.qkv.k, source.qkv.v), group)

    def projected(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.qkv(hidden)
        return out


def fuse_rank(model: Any, group: TensorGroup, *, vision_sharded: bool) -> None:
    """Replaces modules of a model that `rollplex.model.parallel.build` has pointed at a rank's views.

    The towers of Qwen2-VL, which has other norms and gates, stay transformers' own.

    Args:
        vision_sharded: False: every rank has the whole vision tower.
    """
    text = model.model.language_model
    text.rotary_emb = merged_rotary(text)
    for layer in text.layers:
        layer.self_attn = RankAttention(layer.input_layernorm, layer.self_attn, group)
        layer.mlp = RankMlp(layer.post_attention_layernorm, layer.mlp, group)
        layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
    text.norm = Norm(text.norm)
    visual = model.model.visual
    if not hasattr(visual.blocks[0].mlp, "gate_proj"):
        return
    tower = group if vision_sharded else TensorGroup(rank=0, size=1, process_group=None)
    for block in visual.blocks:
        block.attn = RankVisionAttention(block.norm1, block.attn, tower)
        block.mlp = RankMlp(block.norm2, block.mlp, tower)
        block.norm1 = block.norm2 = nn.Identity()
    visual.merger.ln_q = Norm(visual.merger.ln_q)
