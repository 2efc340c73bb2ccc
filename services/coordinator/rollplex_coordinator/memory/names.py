"""What blocks are called where more than one module must call them the same: reservations, and one purpose."""

from __future__ import annotations

ROLLOUT_KV = "rollout K/V"
SCORE_WORKSPACE = "score workspace"
TRAIN_WORKSPACE = "train workspace"
PREFIX_BACKWARD = "prefix backward"

ENGINE_SCRATCH = "engine scratch"
PREFIX_SCRATCH = "prefix scratch"
TRAIN_SCRATCH = "train scratch"
"""Reservations that nothing is leased from: what passes hold for a moment."""

OWN_WEIGHTS = "SGLang's own copy"
