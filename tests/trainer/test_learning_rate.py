"""The learning rate that the trainer service really steps with, against torch.optim stepped with rates written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.optimizers import ADAMW
from support.trainer import Sampled, World, apply, prepare, train_all

RATES = (0.004, 0.008, 0.008, 0.0062)
"""Two updates of warm-up to 0.008, then linearly to a tenth of it at update 6: the fourth has lost a quarter of 0.9."""


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weights_after_each_update_are_those_of_torch_optim_with_the_rates_of_the_schedule(
    make_world: Callable[..., World], groups: list[Sampled], name: str
) -> None:
    world = make_world(
        optimizer={
            "name": name,
            "lr": 0.008,
            "schedule": "linear",
            "warmup_steps": 2,
            "total_steps": 6,
            "final_lr_ratio": 0.1,
        }
    )
    ours = {entry.name: entry for entry in world.table.entries}
    stock = {stored: torch.nn.Parameter(world.weights[stored].clone()) for stored in world.gradients}
    groups_of = [
        {"params": [stock[n] for n in stock if ours[n].decay], "weight_decay": ADAMW.weight_decay},
        {"params": [stock[n] for n in stock if not ours[n].decay], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups_of, betas=ADAMW.betas, eps=ADAMW.eps, fused=True)
    else:
        optimizer = torch.optim.SGD(groups_of, fused=True)
    for version, rate in enumerate(RATES):
        train_all(world, groups, version=version)
        vote = prepare(world, version)
        assert vote.metrics["learning_rate"] == pytest.approx(rate, rel=1e-14)
        for stored, parameter in stock.items():
            parameter.grad = world.gradients[stored].clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert apply(world, version).version == version + 1
        for stored, parameter in stock.items():
            torch.testing.assert_close(world.weights[stored], parameter.data, rtol=1e-6, atol=1e-8)
