"""Settings of optimizers that tests step with."""

from __future__ import annotations

from msgspec.structs import replace

from rollplex.protocol.trainer import Optimizer

ADAMW = Optimizer(
    name="adamw",
    lr=0.01,
    betas=(0.9, 0.95),
    eps=1e-8,
    momentum=0.0,
    weight_decay=0.1,
    max_grad_norm=1.0,
    schedule="constant",
    warmup_steps=0,
    total_steps=10,
    final_lr_ratio=1.0,
)
SGD = replace(ADAMW, name="sgd")
SGD_MOMENTUM = replace(SGD, momentum=0.9)
