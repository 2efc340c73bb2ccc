"""State in host memory, a piece at a time, against the optimizer that has all of it where the weights are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from rollplex.errors import ConfigError
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory.tensors import DTYPES, OptimizerViews
from rollplex.protocol.trainer import Optimizer
from rollplex_trainer.optimizer import SegmentOptimizer
from rollplex_trainer.streamed import StreamedOptimizer
from support.optimizers import ADAMW, SGD, SGD_MOMENTUM

SETTINGS = {
    "adamw": ADAMW,
    "sgd": SGD,
    "sgd-momentum": SGD_MOMENTUM,
}


class Side:
    """The same weights and state as the other side's, under one of the two optimizers."""

    def __init__(
        self, folder: Path, settings: Optimizer, dtype: str, make: Callable[..., StreamedOptimizer | SegmentOptimizer]
    ) -> None:
        self.table = parameter_table(read_shape(folder), dtype=dtype, freeze_vision=False)
        states = optimizer_table(self.table, name=settings.name, momentum=settings.momentum)
        source = torch.Generator().manual_seed(1)
        # Rows apart, as of a rank's columns out of wider ones.
        wide = {e.name: torch.randn(*e.shape[:-1], e.shape[-1] + 3, generator=source) for e in self.table.entries}
        self.weights = {name: value.to(DTYPES[dtype])[..., :-3] for name, value in wide.items()}
        self.gradients = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in self.weights.items()}
        held: dict[str, dict[str, Tensor]] = {}
        for state in states.states:
            held.setdefault(state.kind, {})[state.parameter] = torch.full(state.shape, 9.0, dtype=DTYPES[states.dtype])
        self.state = OptimizerViews(step=torch.tensor(7), states=held)
        self.optimizer = make(settings, self.table, weights=self.weights, gradients=self.gradients, state=self.state)
        self.optimizer.reset()

    def step(self, number: int, rate: float) -> None:
        source = torch.Generator().manual_seed(number)
        for gradient in self.gradients.values():
            gradient.copy_(torch.randn(gradient.shape, generator=source))
        self.optimizer.step(rate)

    def numbers(self) -> dict[str, Tensor]:
        states = {f"{kind} {n}": t for kind, tensors in self.state.states.items() for n, t in tensors.items()}
        return {**self.weights, **states, "step": self.state.step}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_pieces_become_bitwise_what_the_whole_becomes(model_folder: Path, settings: Optimizer, dtype: str) -> None:
    def streamed(*args: object, **options: object) -> StreamedOptimizer:
        return StreamedOptimizer(*args, **options, chunk_bytes=4096)  # type: ignore[arg-type]

    ours, whole = (Side(model_folder, settings, dtype, make) for make in (streamed, SegmentOptimizer))
    for number, rate in enumerate((0.01, 0.005, 0.001)):
        ours.step(number, rate)
        whole.step(number, rate)
    wanted = whole.numbers()
    assert ours.optimizer.steps_made == 3
    for name, value in ours.numbers().items():
        assert torch.equal(value, wanted[name]), name


def test_state_that_was_filled_from_a_checkpoint_goes_on(model_folder: Path) -> None:
    first = Side(model_folder, ADAMW, "bfloat16", StreamedOptimizer)
    other = Side(model_folder, ADAMW, "bfloat16", StreamedOptimizer)
    first.step(0, 0.01)
    for name, value in first.numbers().items():
        other.numbers()[name].copy_(value)
    other.optimizer.restore()
    for side in (first, other):
        side.step(1, 0.01)
    wanted = first.numbers()
    assert all(torch.equal(value, wanted[name]) for name, value in other.numbers().items())


def test_another_optimizer_is_refused_before_any_step(model_folder: Path) -> None:
    settings = msgspec.structs.replace(ADAMW, name="lion")
    table = parameter_table(read_shape(model_folder), dtype="float32", freeze_vision=False)
    with pytest.raises(ConfigError, match="lion"):
        StreamedOptimizer(
            settings, table, weights={}, gradients={}, state=OptimizerViews(step=torch.tensor(0), states={})
        )
