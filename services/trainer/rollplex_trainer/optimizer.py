"""torch.optim over segments.

Owns: one optimizer over the stored (fused) parameters, whose state lies in the optimizer segment, and the gradient's
norm and clip. Does not know: headers, versions, when an update may happen, the schedule.

The rules are torch.optim's own. Only where things lie differs: parameters are views on the actor weights, gradients on
the arena, and state is put in place before the first step, so that torch updates it in place and a replaced process
finds it. AdamW and SGD work number by number, so fused storage and padding (value 0, gradient 0, state 0) change
nothing.

    weights float32 or float64:   weights ◄── step ── gradients
    weights bfloat16:             weights ◄─ round ── master (float32) ◄── step ── gradients in float32, in chunks
    weights of a rank, float32    weights ◄── copy ── a copy without gaps ◄── step ── gradients, in chunks
      or float64, split by
      columns out of wider ones

The last because torch's fused steps walk through a parameter as if it had no gaps, and so through its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollplex.errors import ConfigError
from rollplex.layout.parameters import ParameterTable, Stored
from rollplex.memory.tensors import OptimizerViews
from rollplex.protocol.trainer import Optimizer

CHUNK_BYTES = 64 * 2**20
"""Private copies (of bfloat16 gradients in float32, of weights with gaps) at any moment; more only if one parameter
alone needs more."""
_NORM_NUMBERS = 2**22
CLIP_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """One stored parameter: what the optimizer steps, what it came from."""

    parameter: nn.Parameter
    weight: Tensor
    gradient: Tensor
    apart: bool
    """What is stepped is the weight itself, whose rows lie apart."""


class SegmentOptimizer:
    """AdamW or SGD over segments. Steps in place; a crash inside a step leaves weights that may not be used."""

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
        """Attach to segments as they are; `reset` makes them those of a new run.

        Args:
            table: of the actor weights; its trainable entries are what is optimized.
            weights, gradients: by the names and in the shapes of `table`. Rows of weights may lie apart.
            state: views on the optimizer segment, made with `optimizer_table` for the same table and settings.

        Raises:
            ConfigError: an optimizer other than adamw and sgd.
        """
        self._state = state
        masters = state.states.get("master")
        self._masters = masters is not None
        self._slots = [
            _Slot(
                parameter=nn.Parameter((masters or weights)[entry.name]),
                weight=weights[entry.name],
                gradient=gradients[entry.name],
                apart=not (masters or weights)[entry.name].is_contiguous(),
            )
            for entry in table.trainable_entries
        ]
        copied = self._masters or any(slot.apart for slot in self._slots)
        self._chunks = list(_chunked(self._slots, chunk_bytes)) if copied else [self._slots]
        self._optimizer = torch_optimizer(settings, self._groups(table.trainable_entries, settings.weight_decay))
        self._steps: list[Tensor] = []
        self._place_state(table.trainable_entries)

    def reset(self) -> None:
        """A new run: all moments 0, no steps made, masters equal to the weights."""
        self._state.step.zero_()
        for step in self._steps:
            step.zero_()
        for kind, tensors in self._state.states.items():
            for tensor in tensors.values():
                if kind != "master":
                    tensor.zero_()
        if self._masters:
            for slot in self._slots:
                slot.parameter.data.copy_(slot.weight)

    def restore(self) -> None:
        """The segment's state was filled from a checkpoint: the private step counters follow it."""
        made = float(self.steps_made)
        for step in self._steps:
            step.fill_(made)

    def step(self, learning_rate: float) -> None:
        """One update of all weights from the gradients as they lie in the arena."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for chunk in self._chunks:
            for slot in chunk:
                slot.parameter.grad = slot.gradient.to(slot.parameter.dtype) if self._masters else slot.gradient
                if slot.apart:
                    slot.parameter.data = slot.weight.contiguous()
            self._optimizer.step()
            for slot in chunk:
                slot.parameter.grad = None
                if self._masters or slot.apart:
                    slot.weight.copy_(slot.parameter.data)
                if slot.apart:
                    slot.parameter.data = slot.weight
        self._state.step.add_(1)

    @property
    def steps_made(self) -> int:
        return int(self._state.step)

    def _groups(self, entries: Sequence[Stored], weight_decay: float) -> list[dict[str, object]]:
        """Matrices with weight decay, norms and biases without."""
        pairs = list(zip(entries, self._slots, strict=True))
        decayed = [slot.parameter for entry, slot in pairs if entry.decay]
        others = [slot.parameter for entry, slot in pairs if not entry.decay]
        groups: list[dict[str, object]] = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def _place_state(self, entries: Sequence[Stored]) -> None:
        """Give torch's optimizer the segment's tensors as its state. Its step counters, one per parameter, are private
        copies of the segment's one."""
        moments = {kind: tensors for kind, tensors in self._state.states.items() if kind != "master"}
        made = float(self.steps_made)
        for entry, slot in zip(entries, self._slots, strict=True):
            own: dict[str, object] = {kind: tensors[entry.name] for kind, tensors in moments.items()}
            if "exp_avg" in own:
                step = torch.tensor(made, dtype=torch.float32, device=slot.weight.device)
                own["step"] = step
                self._steps.append(step)
            self._optimizer.state[slot.parameter] = own


def global_norm(arena: Tensor) -> float:
    """Euclidean norm of a whole gradient arena (alignment gaps are 0), summed in float64; not finite if any is not."""
    parts = torch.split(arena, _NORM_NUMBERS)  # torch widens a part as a whole
    norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    return math.hypot(*norms.tolist())  # one wait for the device, not one per part


def clip_factor(norm: float, max_norm: float) -> float:
    """What the gradient is multiplied by so that its norm is at most `max_norm`; 1.0 if it is, or if `max_norm` is 0.

    torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
    """
    return min(1.0, max_norm / (norm + CLIP_EPSILON)) if max_norm > 0 else 1.0


def all_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinite. One pass without a temporary, unless the sum of squares overflows."""
    return math.isfinite(float(torch.linalg.vector_norm(values))) or bool(torch.isfinite(values).all())


def torch_optimizer(settings: Optimizer, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    """torch's own, over its parameter groups. Raises ConfigError: a name other than adamw and sgd."""
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=True)
        case _:
            raise ConfigError(
                "Unknown optimizer", got=repr(settings.name), needed="adamw or sgd", where="optimizer.name"
            )


def _chunked(slots: Iterable[_Slot], chunk_bytes: int) -> Iterator[list[_Slot]]:
    chunk: list[_Slot] = []
    size = 0
    for slot in slots:
        more = slot.parameter.numel() * slot.parameter.element_size()
        if chunk and size + more > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(slot)
        size += more
    if chunk:
        yield chunk
