"""Modules that take the place of transformers' in a built model: same weights, same positions, same contexts.

Owns: parameters over the stored tensors as they are (q|k|v, gate|up, padded), gradients likewise, and which modules are
replaced. The padding of the vision MLP is 0 and stays so: what is computed from it is 0, and so is its gradient. Does
not know: kernels (`ops`), what a pass attends to (`rollplex.model.attention`, `vision`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from rollplex.model.attention import text_attention
from rollplex.model.fused import ops
from rollplex.model.vision import vision_attention


class Stored:
    """Parameters by stored name, each made once, with the arena's tensor as its gradient."""

    def __init__(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor] | None) -> None:
        """gradients: None if no parameter needs one; frozen parameters are absent."""
        self._weights = weights
        self._gradients = gradients or {}

    def __call__(self, name: str) -> nn.Parameter:
        """Raises KeyError if there is no such tensor."""
        gradient = self._gradients.get(name)
        parameter = nn.Parameter(self._weights[name], requires_grad=gradient is not None)
        parameter.grad = gradient
        return parameter


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        source: Any = old
        self.weight: nn.Parameter = source.weight
        self.eps = float(source.variance_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., W] -> [..., W]."""
        return ops.rms_norm(hidden, self.weight, self.eps)


class Mlp(nn.Module):
    """The norm before it, gate and up in one product, in the stored width."""

    def __init__(self, norm: nn.Module, stored: Stored, name: str, *, bias: bool) -> None:
        super().__init__()
        self.norm = Norm(norm)
        self.gate_up = stored(f"{name}.gate_up_proj.weight")
        self.down = stored(f"{name}.down_proj.weight")
        self.gate_up_bias = stored(f"{name}.gate_up_proj.bias") if bias else None
        self.down_bias = stored(f"{name}.down_proj.bias") if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        gate_up = ops.norm_linear(hidden, self.norm.weight, self.norm.eps, self.gate_up, self.gate_up_bias)
        return ops.gate_linear(gate_up, self.down, self.down_bias)


class Attention(nn.Module):
    """A text layer's, with the norm before it: rotation and the pass's own attention. What is around them, q, k and v
    and the output projection, is for whom it is made."""

    def __init__(self, norm: nn.Module, old: nn.Module, *, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm = Norm(norm)
        source: Any = old
        self.layer_idx: int = source.layer_idx
        self.scaling: float = source.scaling
        self.head_dim: int = source.head_dim
        self.heads, self.kv_heads = heads, kv_heads

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        rollplex: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [B, T, hidden]; position_embeddings [B, T, D] each, from `Rotary`."""
        rows, tokens, _width = hidden_states.shape
        qkv = self.projected(hidden_states).flatten(0, 1)
        cos, sin = (t.expand(rows, -1, -1).reshape(rows * tokens, -1) for t in position_embeddings)
        parts = ops.rotate(qkv, cos, sin, heads=self.heads, kv_heads=self.kv_heads, wide=False)
        query, key, value = (t.view(rows, tokens, -1, self.head_dim).transpose(1, 2) for t in parts)
        out, _none = text_attention(self, query, key, value, attention_mask, scaling=self.scaling, rollplex=rollplex)
        return self.merged(out.reshape(rows, tokens, -1)), None

    def projected(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> q | k | v [..., (heads + 2 kv_heads) * D], normed before."""
        raise NotImplementedError

    def merged(self, heads: Tensor) -> Tensor:
        """[..., heads * D] -> [..., hidden]."""
        raise NotImplementedError


class TextAttention(Attention):
    """q, k and v in one product."""

    def __init__(self, norm: nn.Module, old: nn.Module, stored: Stored, name: str) -> None:
        source: Any = old
        super().__init__(norm, old, heads=source.num_heads, kv_heads=source.num_key_value_heads)
        self.qkv = stored(f"{name}.qkv_proj.weight")
        self.qkv_bias = stored(f"{name}.qkv_proj.bias")
        self.out: nn.Parameter = source.o_proj.weight

    def projected(self, hidden: Tensor) -> Tensor:
        return ops.norm_linear(hidden, self.norm.weight, self.norm.eps, self.qkv, self.qkv_bias)

    def merged(self, heads: Tensor) -> Tensor:
        return F.linear(heads, self.out)


class Rotary(nn.Module):
    """transformers' cos and sin, with the three kinds of position merged once instead of in every layer."""

    def __init__(self, old: nn.Module, section: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = old
        self.section = [*section, *section]

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [3, B, T] -> cos, sin [B, T, D]."""
        cos, sin = self.inner(hidden, position_ids)
        if cos.dim() == 3:  # newer transformers merge there
            return cos, sin
        return self._merged(cos), self._merged(sin)

    def _merged(self, angles: Tensor) -> Tensor:
        parts: tuple[Tensor, ...] = torch.split(angles, self.section, dim=-1)
        return torch.cat([part[n % 3] for n, part in enumerate(parts)], -1)


class VisionHeads(nn.Module):
    """A vision block's attention, with the norm before it, and the rotation in one kernel. q, k and v are for whom it
    is made."""

    def __init__(self, norm: nn.Module, old: nn.Module) -> None:
        super().__init__()
        self.norm = Norm(norm)
        source: Any = old
        self.heads: int = source.num_heads
        self.scaling: float = source.scaling
        self.proj: nn.Module = source.proj

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        rollplex: Any = None,
        **_: Any,
    ) -> Tensor:
        """hidden_states [N, hidden]; position_embeddings [N, D] each."""
        cos, sin = position_embeddings
        parts = ops.rotate(self.projected(hidden_states), cos, sin, heads=self.heads, kv_heads=self.heads, wide=True)
        query, key, value = (t.transpose(0, 1)[None] for t in parts)
        out, _none = vision_attention(
            self, query, key, value, None, scaling=self.scaling, cu_seq_lens_q=cu_seqlens, rollplex=rollplex
        )
        merged: Tensor = self.proj(out.reshape(hidden_states.shape[0], -1))
        return merged

    def projected(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> q | k | v [N, 3 * heads * D], normed before."""
        raise NotImplementedError


class VisionAttention(VisionHeads):
    """q, k and v in one product."""

    def __init__(self, norm: nn.Module, old: nn.Module) -> None:
        super().__init__(norm, old)
        source: Any = old
        self.qkv: nn.Linear = source.qkv

    def projected(self, hidden: Tensor) -> Tensor:
        return ops.norm_linear(hidden, self.norm.weight, self.norm.eps, self.qkv.weight, self.qkv.bias)


def fuse(model: Any, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor] | None) -> None:
    """Replaces modules of a model that `rollplex.model.build` has pointed at its views.

    The towers of Qwen2-VL, which has other norms and gates, stay transformers' own.

    Args:
        model: not plain.
        weights, gradients: stored name -> tensor, as `build` takes them.
    """
    stored = Stored(weights, gradients)
    text = model.model.language_model
    text.rotary_emb = merged_rotary(text)
    for number, layer in enumerate(text.layers):
        of = f"model.layers.{number}"
        layer.self_attn = TextAttention(layer.input_layernorm, layer.self_attn, stored, f"{of}.self_attn")
        layer.mlp = Mlp(layer.post_attention_layernorm, stored, f"{of}.mlp", bias=False)
        layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
    text.norm = Norm(text.norm)
    visual = model.model.visual
    if f"{_BLOCK.format(0)}.mlp.gate_up_proj.weight" not in weights:
        return
    for number, block in enumerate(visual.blocks):
        block.attn = VisionAttention(block.norm1, block.attn)
        block.mlp = Mlp(block.norm2, stored, f"{_BLOCK.format(number)}.mlp", bias=True)
        block.norm1 = block.norm2 = nn.Identity()
    visual.merger.ln_q = Norm(visual.merger.ln_q)


_BLOCK = "visual.blocks.{}"


def merged_rotary(text: Any) -> Rotary:
    """In the place of a language model's."""
    config = text.config
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return Rotary(text.rotary_emb, tuple(int(n) for n in parameters["mrope_section"]))
