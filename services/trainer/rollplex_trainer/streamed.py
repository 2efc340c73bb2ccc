"""An optimizer whose state stays in host memory and passes through the device a piece at a time.

    state, host      ─► a piece of it on the device ─ step ─► back
    weights, arena   where they always are

Owns how parameters are cut into pieces and what is copied. The rules are torch.optim's own, and work number by number,
so that every number becomes what `SegmentOptimizer` makes of it, bit for bit (tested). For models whose state does not
fit beside the rest: 12 bytes for each bfloat16 weight under AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollplex.layout.parameters import ParameterTable, Stored
from rollplex.memory.tensors import OptimizerViews
from rollplex.protocol.trainer import Optimizer
from rollplex_trainer.optimizer import CHUNK_BYTES, SegmentOptimizer, torch_optimizer

_MULTIPLE = 64
"""Numbers: pieces of a vector end where a vector unit's do, so that the same instructions compute each number."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some rows of one parameter."""

    entry: Stored
    rows: slice


class StreamedOptimizer:
    """AdamW or SGD over segments, with state in host memory. Steps in place; a crash inside a step leaves weights that
    may not be used."""

    def __init__(
        self,
        settings: Optimizer,
        table: ParameterTable,
        *,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: OptimizerViews,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """As `SegmentOptimizer`; `state` may lie on another device than weights and gradients.

        Args:
            chunk_bytes: of what is stepped at a time, in the state's dtype; a single row may be more. As many bytes
                again for its gradient and for each moment are on the device meanwhile.

        Raises:
            ConfigError: an optimizer other than adamw and sgd.
        """
        torch_optimizer(settings, [{"params": [nn.Parameter(torch.zeros(1))]}])  # refuses a name at once
        self._settings = settings
        self._table = table
        self._weights, self._gradients, self._state = weights, gradients, state
        self._masters = state.states.get("master")
        self._moments = {kind: tensors for kind, tensors in state.states.items() if kind != "master"}
        self._pieces = [piece for entry in table.trainable_entries for piece in self._cut(entry, chunk_bytes)]

    def reset(self) -> None:
        """A new run: all moments 0, no steps made, masters equal to the weights."""
        self._state.step.zero_()
        for tensors in self._moments.values():
            for tensor in tensors.values():
                tensor.zero_()
        for name, master in (self._masters or {}).items():
            master.copy_(self._weights[name])

    def restore(self) -> None:
        """The segment's state was filled from a checkpoint. Nothing here is private."""

    def step(self, learning_rate: float) -> None:
        """One update of all weights from the gradients as they lie in the arena."""
        made = float(self.steps_made)
        for piece in self._pieces:
            self._step_piece(piece, learning_rate, made)
        self._state.step.add_(1)

    @property
    def steps_made(self) -> int:
        return int(self._state.step)

    def _step_piece(self, piece: _Piece, learning_rate: float, made: float) -> None:
        name, rows = piece.entry.name, piece.rows
        weight = self._weights[name][rows]
        stored = weight if self._masters is None else self._masters[name][rows]
        parameter = nn.Parameter(_copied(stored, weight.device))
        parameter.grad = _copied(self._gradients[name][rows], weight.device).to(parameter.dtype)
        moments = {kind: _copied(tensors[name][rows], weight.device) for kind, tensors in self._moments.items()}
        own: dict[str, object] = dict(moments)
        if "exp_avg" in moments:
            own["step"] = torch.tensor(made, dtype=torch.float32, device=weight.device)
        decay = self._settings.weight_decay if piece.entry.decay else 0.0
        optimizer = torch_optimizer(self._settings, [{"params": [parameter], "weight_decay": decay}])
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.state[parameter] = own
        optimizer.step()
        weight.copy_(parameter.data)
        if self._masters is not None:
            self._masters[name][rows].copy_(parameter.data)
        for kind, moment in moments.items():
            self._moments[kind][name][rows].copy_(moment)

    def _cut(self, entry: Stored, chunk_bytes: int) -> Iterator[_Piece]:
        weight = self._weights[entry.name]
        width = weight[0].numel() if weight.dim() > 1 else 1
        item = (weight if self._masters is None else self._masters[entry.name]).element_size()
        step = max(1, chunk_bytes // (width * item))
        if width % _MULTIPLE:
            step = max(_MULTIPLE, step - step % _MULTIPLE)
        for start in range(0, weight.shape[0], step):
            yield _Piece(entry=entry, rows=slice(start, min(start + step, weight.shape[0])))


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Without gaps, on `device`, and never the same memory."""
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def make_optimizer(
    settings: Optimizer,
    table: ParameterTable,
    *,
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    state: OptimizerViews,
) -> SegmentOptimizer | StreamedOptimizer:
    """The one that `settings` ask for. Raises ConfigError: an optimizer other than adamw and sgd."""
    kind = StreamedOptimizer if settings.streamed else SegmentOptimizer
    return kind(settings, table, weights=weights, gradients=gradients, state=state)
