"""The optimizer over segments against torch's own on ordinary tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from rollplex.errors import ConfigError
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory.tensors import DTYPES, OptimizerViews, optimizer_views, padding, tensor, views
from rollplex.model.weights import fill
from rollplex.protocol.common import Kind, SegmentRef
from rollplex.protocol.trainer import Optimizer
from rollplex_trainer.optimizer import SegmentOptimizer, all_finite, clip_factor, global_norm
from support.optimizers import ADAMW, SGD, SGD_MOMENTUM
from support.segments import HostSegments

RATES = (0.01, 0.01, 0.005, 0.002, 0.001)


@dataclass
class Rig:
    """Weights, arena and optimizer state in segments."""

    table: ParameterTable
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    arena: Tensor
    state: OptimizerViews
    state_ref: SegmentRef
    optimizer: SegmentOptimizer


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(model_folder: Path, make_segments: Callable[[], HostSegments]) -> MakeRig:
    def make(settings: Optimizer, dtype: str = "float32", *, freeze_vision: bool = False, chunk_bytes: int = 0) -> Rig:
        segments = make_segments()
        table = parameter_table(read_shape(model_folder), dtype=dtype, freeze_vision=freeze_vision)
        gradients = gradient_table(table)
        states = optimizer_table(table, name=settings.name, momentum=settings.momentum)
        actor = segments.attach(segments.create(Kind.ACTOR_WEIGHTS, table.total_bytes))
        arena = segments.attach(segments.create(Kind.GRADIENTS, gradients.total_bytes))
        state_ref = segments.create(Kind.OPTIMIZER_STATE, states.total_bytes)
        weights = views(actor, table)
        fill(table, weights, model_folder)
        rig = Rig(
            table=table,
            weights=weights,
            gradients=views(arena, gradients),
            arena=tensor(arena, 0, (gradients.total_bytes // DTYPES[dtype].itemsize,), DTYPES[dtype]),
            state=optimizer_views(segments.attach(state_ref), states),
            state_ref=state_ref,
            optimizer=None,  # type: ignore[arg-type]  # attached below, as a replaced process would
        )
        attach(rig, settings, chunk_bytes)
        rig.optimizer.reset()
        return rig

    return make


def attach(rig: Rig, settings: Optimizer, chunk_bytes: int = 0) -> None:
    rig.optimizer = SegmentOptimizer(
        settings,
        rig.table,
        weights=rig.weights,
        gradients=rig.gradients,
        state=rig.state,
        chunk_bytes=chunk_bytes or 2**26,
    )


def draw_gradients(rig: Rig, step: int) -> None:
    """Random gradients in what belongs to a parameter, 0 in the padding, as a backward leaves them."""
    source = torch.Generator().manual_seed(step)
    for gradient in rig.gradients.values():
        gradient.copy_(torch.randn(gradient.shape, generator=source))
    for gaps in padding(rig.gradients, gradient_table(rig.table)).values():
        for gap in gaps:
            gap.zero_()


class Stock:
    """torch.optim on ordinary tensors with the same numbers."""

    def __init__(self, rig: Rig, settings: Optimizer, dtype: torch.dtype, **options: bool) -> None:
        entries = rig.table.trainable_entries
        self.tensors = {e.name: nn.Parameter(rig.weights[e.name].detach().clone().to(dtype)) for e in entries}
        groups = [
            {"params": [self.tensors[e.name] for e in entries if e.decay], "weight_decay": settings.weight_decay},
            {"params": [self.tensors[e.name] for e in entries if not e.decay], "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer
        if settings.name == "adamw":
            self.optimizer = torch.optim.AdamW(
                groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, **options
            )
        else:
            self.optimizer = torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, **options)

    def step(self, rig: Rig, rate: float) -> None:
        for name, parameter in self.tensors.items():
            parameter.grad = rig.gradients[name].detach().clone().to(parameter.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


@pytest.mark.parametrize("settings", [ADAMW, SGD, SGD_MOMENTUM], ids=["adamw", "sgd", "sgd-momentum"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_five_steps_are_bitwise_those_of_torch(make_rig: MakeRig, settings: Optimizer, dtype: str) -> None:
    rig = make_rig(settings, dtype)
    stock = Stock(rig, settings, DTYPES[dtype], fused=True)
    for step, rate in enumerate(RATES):
        draw_gradients(rig, step)
        stock.step(rig, rate)
        rig.optimizer.step(rate)
    for name, parameter in stock.tensors.items():
        assert torch.equal(rig.weights[name], parameter), name
        for kind, tensors in rig.state.states.items():
            assert torch.equal(tensors[name], stock.optimizer.state[parameter][kind]), (kind, name)
    assert rig.optimizer.steps_made == 5


@pytest.mark.parametrize("settings", [ADAMW, SGD_MOMENTUM], ids=["adamw", "sgd-momentum"])
def test_five_steps_agree_with_torchs_plain_loop(make_rig: MakeRig, settings: Optimizer) -> None:
    rig = make_rig(settings)
    stock = Stock(rig, settings, torch.float32, foreach=False)
    for step, rate in enumerate(RATES):
        draw_gradients(rig, step)
        stock.step(rig, rate)
        rig.optimizer.step(rate)
    for name, parameter in stock.tensors.items():
        torch.testing.assert_close(rig.weights[name], parameter.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("chunk_bytes", [2**26, 3000], ids=["one-chunk", "many-chunks"])
@pytest.mark.parametrize("settings", [ADAMW, SGD, SGD_MOMENTUM], ids=["adamw", "sgd", "sgd-momentum"])
def test_bfloat16_weights_are_rounded_from_a_float32_master(
    make_rig: MakeRig, settings: Optimizer, chunk_bytes: int
) -> None:
    rig = make_rig(settings, "bfloat16", chunk_bytes=chunk_bytes)
    stock = Stock(rig, settings, torch.float32, fused=True)
    for step, rate in enumerate(RATES):
        draw_gradients(rig, step)
        stock.step(rig, rate)
        rig.optimizer.step(rate)
    for name, parameter in stock.tensors.items():
        assert torch.equal(rig.state.states["master"][name], parameter), name
        assert torch.equal(rig.weights[name], parameter.to(torch.bfloat16)), name


def test_small_updates_add_up_in_the_master_although_each_is_below_a_bfloat16(make_rig: MakeRig) -> None:
    rig = make_rig(msgspec.structs.replace(SGD, weight_decay=0.0), "bfloat16")
    name = next(iter(rig.weights))
    rig.state.states["master"][name].fill_(1.0)
    rig.weights[name].fill_(1.0)
    for gradient in rig.gradients.values():
        gradient.fill_(1.0)
    rig.optimizer.step(2**-10)
    assert bool((rig.weights[name] == 1.0).all())
    for _ in range(7):
        rig.optimizer.step(2**-10)
    assert bool((rig.weights[name] == 1 - 2**-7).all())


@pytest.mark.parametrize("settings", [ADAMW, SGD_MOMENTUM], ids=["adamw", "sgd-momentum"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_lives_in_the_segment(make_rig: MakeRig, settings: Optimizer, dtype: str) -> None:
    straight, replaced = make_rig(settings, dtype), make_rig(settings, dtype)
    for step, rate in enumerate(RATES):
        for rig in (straight, replaced):
            draw_gradients(rig, step)
            rig.optimizer.step(rate)
        attach(replaced, settings)
        assert replaced.optimizer.steps_made == step + 1
    for name, weight in straight.weights.items():
        assert torch.equal(weight, replaced.weights[name]), name
    for kind, tensors in straight.state.states.items():
        for name, state in tensors.items():
            assert torch.equal(state, replaced.state.states[kind][name]), (kind, name)


@pytest.mark.parametrize("settings", [ADAMW, SGD_MOMENTUM], ids=["adamw", "sgd-momentum"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_whose_rows_lie_apart_step_as_others_and_leave_their_neighbours(
    make_rig: MakeRig, settings: Optimizer, dtype: str
) -> None:
    """As a training rank's columns do in the wider shard that rollout has."""
    rig, usual = make_rig(settings, dtype), make_rig(settings, dtype)
    wide = {name: torch.cat([w, w + 7.0], 1) for name, w in rig.weights.items() if w.ndim == 2}
    before = {name: value.clone() for name, value in wide.items()}
    rig.weights |= {name: value[:, : rig.weights[name].shape[1]] for name, value in wide.items()}
    attach(rig, settings, chunk_bytes=2**14)
    for step, rate in enumerate(RATES):
        for each in (rig, usual):
            draw_gradients(each, step)
            each.optimizer.step(rate)
    for name, weight in usual.weights.items():
        assert torch.equal(rig.weights[name], weight), name
    for name, value in wide.items():
        columns = rig.weights[name].shape[1]
        assert torch.equal(value[:, columns:], before[name][:, columns:]), name
        assert not torch.equal(value[:, :columns], before[name][:, :columns]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_happen_in_place_and_leave_padding_and_frozen_weights_alone(make_rig: MakeRig, dtype: str) -> None:
    rig = make_rig(ADAMW, dtype, freeze_vision=True)
    before = {name: weight.clone() for name, weight in rig.weights.items()}
    places = {name: weight.data_ptr() for name, weight in rig.weights.items()}
    draw_gradients(rig, 0)
    arena = rig.arena.clone()
    rig.optimizer.step(0.01)
    assert torch.equal(arena, rig.arena)
    assert {name: weight.data_ptr() for name, weight in rig.weights.items()} == places
    for entry in rig.table.entries:
        changed = not torch.equal(before[entry.name], rig.weights[entry.name])
        assert changed == entry.trainable, entry.name
    for gaps in padding(rig.weights, rig.table).values():
        assert not any(gap.any() for gap in gaps)


def test_weight_decay_moves_matrices_but_no_norms_and_biases(make_rig: MakeRig) -> None:
    rig = make_rig(msgspec.structs.replace(SGD, weight_decay=0.5))
    before = {name: weight.clone() for name, weight in rig.weights.items()}
    rig.arena.zero_()
    rig.optimizer.step(0.1)
    kinds = set()
    for entry in rig.table.entries:
        scale = 1 - 0.1 * 0.5 if entry.decay else 1.0
        torch.testing.assert_close(rig.weights[entry.name], before[entry.name] * scale, rtol=1e-6, atol=0)
        kinds.add((entry.name.split(".")[-1], entry.decay, len(entry.shape) > 1))
    assert {("bias", False, False), ("weight", False, False), ("weight", True, True)} <= kinds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [ADAMW, SGD_MOMENTUM], ids=["adamw", "sgd"])
def test_at_a_learning_rate_of_0_steps_are_made_and_weights_stay(
    make_rig: MakeRig, settings: Optimizer, dtype: str
) -> None:
    rig = make_rig(msgspec.structs.replace(settings, lr=0.0), dtype)
    before = {name: weight.clone() for name, weight in rig.weights.items()}
    for step in range(2):
        draw_gradients(rig, step)
        rig.optimizer.step(0.0)
    assert rig.optimizer.steps_made == 2
    assert all(torch.equal(rig.weights[name], weight) for name, weight in before.items())


def test_reset_forgets_moments_and_steps(make_rig: MakeRig) -> None:
    rig = make_rig(ADAMW, "bfloat16")
    draw_gradients(rig, 0)
    rig.optimizer.step(0.01)
    rig.optimizer.reset()
    assert rig.optimizer.steps_made == 0
    for entry in rig.table.trainable_entries:
        assert torch.equal(rig.state.states["master"][entry.name], rig.weights[entry.name].float())
        assert not rig.state.states["exp_avg"][entry.name].any()
        assert not rig.state.states["exp_avg_sq"][entry.name].any()


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 1e9])
def test_clipping_is_torchs(make_rig: MakeRig, max_norm: float) -> None:
    rig = make_rig(ADAMW)
    draw_gradients(rig, 0)
    ordinary = [nn.Parameter(torch.zeros_like(gradient)) for gradient in rig.gradients.values()]
    for parameter, gradient in zip(ordinary, rig.gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    total = nn.utils.clip_grad_norm_(ordinary, max_norm)
    norm = global_norm(rig.arena)
    assert norm == pytest.approx(total.item(), rel=1e-6)
    rig.arena.mul_(clip_factor(norm, max_norm))
    for parameter, gradient in zip(ordinary, rig.gradients.values(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_without_a_maximum_nothing_is_clipped() -> None:
    assert clip_factor(1e30, 0.0) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_makes_norm_and_check_fail(make_rig: MakeRig, bad: float) -> None:
    rig = make_rig(SGD)
    draw_gradients(rig, 0)
    assert all_finite(rig.arena)
    rig.arena[-1] = bad
    assert not math.isfinite(global_norm(rig.arena))
    assert not all_finite(rig.arena)


def test_large_but_finite_numbers_are_finite() -> None:
    large = torch.full((10,), 3e38)
    assert all_finite(large)
    assert math.isfinite(global_norm(large))


def test_an_unknown_optimizer_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(SGD)
    with pytest.raises(ConfigError, match="adam8bit"):
        attach(rig, msgspec.structs.replace(SGD, name="adam8bit"))
