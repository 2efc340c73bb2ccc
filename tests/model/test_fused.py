"""The fused modules are transformers' modules, to rounding; their kernels are `reference`, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from rollplex.memory.tensors import padding
from rollplex.model.build import build
from rollplex.model.fused import ops, reference
from rollplex.model.prefix import PrefixState, prefix_backward, prefix_forward
from rollplex.model.suffix import suffix_forward

BOUNDS = {"float32": 2e-5, "float64": 1e-6}
"""Relative. float64 is bounded by transformers' own float32 in norms and in the vision rotation."""


def gradients(kit: Any, store: Any, model: Any) -> tuple[PrefixState, Tensor, dict[str, Tensor]]:
    """Prefix state, log-probabilities and all gradients of one prefix and suffix pass."""
    for gradient in store.gradients.values():
        gradient.zero_()
    samples = [kit.sample([9, ("image", (1, 8, 12)), 5], 0), kit.sample([4, ("video", (2, 4, 8), 1.0), 7], 1)]
    state = prefix_forward(model, kit.batch(samples), grad=True)
    tokens, lengths = kit.responses([4, 2, 5, 1], 3)
    leaves = PrefixState(
        keys=[k.detach().requires_grad_() for k in state.keys],
        values=[v.detach().requires_grad_() for v in state.values],
        last_hidden=state.last_hidden.detach().requires_grad_(),
        lengths=state.lengths,
        next_positions=state.next_positions,
    )
    out = suffix_forward(model, leaves, tokens, lengths, temperature=0.9, never_sampled=kit.NEVER)
    out.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    of = [*leaves.keys, *leaves.values, leaves.last_hidden]
    grads = [t.grad for t in of]
    layers = len(state.keys)
    assert all(g is not None for g in grads)
    prefix_backward(state, grads[:layers], grads[layers : 2 * layers], grads[-1])  # type: ignore[arg-type]
    return state, out.logprobs.detach(), {name: g.clone() for name, g in store.gradients.items()}


def off(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["tiny", "gpu", "deep", "qwen2"])
def test_the_fused_model_gives_transformers_numbers_and_gradients(kit: Any, name: str, dtype: str) -> None:
    store = kit.store(name, dtype=dtype)
    fused = build(store.folder, store.table, store.views, gradients=store.gradients, freeze_vision=False, fused=True)
    slow_state, slow_logprobs, slow = gradients(kit, store, store.model)
    state, logprobs, fast = gradients(kit, store, fused)
    assert off(state.last_hidden.detach(), slow_state.last_hidden.detach()) < BOUNDS[dtype]
    assert off(state.keys[-1].detach(), slow_state.keys[-1].detach()) < BOUNDS[dtype]
    assert off(logprobs, slow_logprobs) < BOUNDS[dtype]
    assert set(fast) == set(slow)
    # The bias of K has no gradient (it moves all scores of a query alike): what is there is rounding.
    worst = {n: off(fast[n], slow[n]) for n in slow if slow[n].norm() > 1e-6 * max(g.norm() for g in slow.values())}
    assert max(worst.values()) < BOUNDS[dtype] * 10, worst


def test_padding_gets_no_gradient(kit: Any) -> None:
    store = kit.store("gpu")
    fused = build(store.folder, store.table, store.views, gradients=store.gradients, freeze_vision=False, fused=True)
    _, _, found = gradients(kit, store, fused)
    gaps = [gap for parts in padding(found, store.table).values() for gap in parts]
    assert sum(gap.numel() for gap in gaps) > 0
    assert all(not gap.any() for gap in gaps)


def test_a_frozen_tower_stays_frozen(kit: Any) -> None:
    store = kit.store("gpu", frozen=True)
    fused = build(store.folder, store.table, store.views, gradients=store.gradients, freeze_vision=True, fused=True)
    assert not any(p.requires_grad for p in fused.model.visual.parameters())
    _, _, found = gradients(kit, store, fused)
    assert all(bool(g.any()) for n, g in found.items() if n.endswith("mlp.gate_up_proj.weight"))


def run(function: Callable[..., Any], *inputs: Tensor, seed: int = 7) -> list[Tensor]:
    """Outputs, and the gradients of the inputs that want one, for random gradients of the outputs."""
    given = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    outs = function(*given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(o.shape, generator=generator).to(o) for o in outs]
    torch.autograd.backward(outs, grads)
    return [*(o.detach() for o in outs), *(t.grad for t in given if t.grad is not None)]


KERNELS: dict[str, Any] = {}


def case(name: str) -> Callable[[Any], Any]:
    def keep(function: Any) -> Any:
        KERNELS[name] = function
        return function

    return keep


def numbers(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


@case("norm")
def _norm() -> tuple[Any, Any, tuple[Tensor, ...]]:
    return (lambda x, w: ops.rms_norm(x, w, 1e-6), lambda x, w: reference.rms_norm(x, w, 1e-6),
            (numbers(700, 1280), numbers(1280)))  # fmt: skip


@case("norm and product")
def _norm_linear() -> tuple[Any, Any, tuple[Tensor, ...]]:
    def slow(x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(reference.rms_norm(x, norm, 1e-6), weight, bias)

    return (lambda x, n, w, b: ops.norm_linear(x, n, 1e-6, w, b), slow,
            (numbers(3, 40, 1280), numbers(1280), numbers(64, 1280), numbers(64)))  # fmt: skip


@case("gate and product")
def _gate_linear() -> tuple[Any, Any, tuple[Tensor, ...]]:
    def slow(gate_up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(reference.silu_mul(gate_up), weight, bias)

    return ops.gate_linear, slow, (numbers(3, 11, 2 * 3424), numbers(64, 3424), numbers(64))


def _rotation(heads: int, kv: int, dim: int, *, wide: bool) -> tuple[Any, Any, tuple[Tensor, ...]]:
    angles = numbers(50, dim // 2, grad=False)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))

    def of(function: Any) -> Any:
        def turn(qkv: Tensor) -> Any:
            fit = [t.to(qkv.device, t.dtype if wide else qkv.dtype) for t in (cos, sin)]
            return function(qkv, *fit, heads=heads, kv_heads=kv, wide=wide)

        return turn

    return of(ops.rotate), of(reference.rotate), (numbers(50, (heads + 2 * kv) * dim),)


@case("text rotation")
def _text_rotation() -> tuple[Any, Any, tuple[Tensor, ...]]:
    return _rotation(16, 2, 128, wide=False)


@case("vision rotation")
def _vision_rotation() -> tuple[Any, Any, tuple[Tensor, ...]]:
    return _rotation(16, 16, 80, wide=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KERNELS)
def test_an_operation_on_a_host_has_the_gradients_of_its_reference(name: str, dtype: torch.dtype) -> None:
    fast, slow, inputs = KERNELS[name]()
    given = [t.detach().to(dtype).requires_grad_() for t in inputs]
    for number, (got, wanted) in enumerate(zip(run(fast, *given), run(slow, *given), strict=True)):
        assert off(got, wanted) < (1e-6 if dtype == torch.float32 else 1e-12), number


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_its_reference(name: str) -> None:
    fast, slow, inputs = KERNELS[name]()
    given = [t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in inputs]
    for number, (got, wanted) in enumerate(zip(run(fast, *given), run(slow, *given), strict=True)):
        assert off(got.float(), wanted.float()) < 1e-2, number
    assert all(torch.equal(a, b) for a, b in zip(run(fast, *given), run(fast, *given), strict=True)), "same bits"
