"""Where the next token of each running response stands, for SGLang 0.5.17.

Owns: the positions of one decode step, computed at once. SGLang makes some small tensors for each response, in the
thread that starts the GPU's work: milliseconds a step where hundreds run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

POSITIONS: Final = "sglang.srt.model_executor.forward_batch_info.ForwardBatch._compute_mrope_positions"
_SHIFT: Final = "rollplex_shift"


def at_once(original: Callable[[Any, Any, Any], None], self: Any, model_runner: Any, batch: Any) -> None:
    """The same numbers.

    Args:
        original: SGLang's own, for all that is not a plain decode step.
        self: the ForwardBatch, which gets `mrope_positions`, int64 [3, responses].
        model_runner: of the model.
        batch: the ScheduleBatch.
    """
    pictured = batch.multimodal_inputs
    if not self.forward_mode.is_decode():
        original(self, model_runner, batch)
        return
    lengths = self.seq_lens_cpu.to(torch.int64)
    known = torch.tensor([0 if one is None else one.mrope_positions.shape[1] for one in pictured])
    if bool((known >= lengths).any()):  # of a model whose responses have positions of their own
        original(self, model_runner, batch)
        return
    shifts = torch.tensor([-1 if one is None else _shift(one) for one in pictured])
    self.mrope_positions = (lengths + shifts).repeat(3, 1).to(device=model_runner.device, non_blocking=True)


def _shift(pictured: Any) -> int:
    """What is added to a response's length so far; found once for each."""
    shift: int | None = pictured.__dict__.get(_SHIFT)
    if shift is None:
        shift = int(pictured.mrope_position_delta) - 1
        setattr(pictured, _SHIFT, shift)
    return shift
