"""The optimizer-state segment: what the optimizer keeps for every trainable parameter.

Owns: which states an optimizer has, their dtype and place. Does not know: the update rules (trainer), tensors, memory.

States have the stored shape, padding included; padding has gradient 0 and stays 0 under every rule. They are float32,
or float64 for a float64 model. A master copy exists only where the weights are coarser than that (bfloat16).

    [ step: int64, in 256 bytes | per trainable entry: master? exp_avg exp_avg_sq | or master? momentum_buffer? ]
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

from rollplex.errors import ConfigError
from rollplex.layout.parameters import ITEM_BYTES, ParameterTable, align

STEP_OFFSET: Final = 0
"""int64: optimizer steps made, for the whole model."""
_FIRST_OFFSET: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One array of optimizer state, contiguous from `offset` on, 256-byte aligned."""

    parameter: str
    """SGLang's name of the entry."""
    kind: str
    """master, exp_avg, exp_avg_sq or momentum_buffer."""
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class OptimizerTable:
    """All states of one segment, in the order of their offsets: by entry, then by kind."""

    name: str
    """adamw or sgd."""
    dtype: str
    """float32, or float64."""
    states: tuple[State, ...]
    total_bytes: int

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) over every field in order."""
        lines = [f"rollplex optimizer 1 name={self.name} dtype={self.dtype} total={self.total_bytes}"]
        for state in self.states:
            dims = "x".join(map(str, state.shape))
            lines.append(f"{state.parameter} {state.kind} {dims} {state.offset}+{state.size_bytes}")
        return hashlib.sha256(("\n".join(lines) + "\n").encode()).hexdigest()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of every parameter, in order."""
        return tuple(dict.fromkeys(state.kind for state in self.states))

    def get(self, parameter: str, kind: str) -> State:
        """The state `kind` of the entry `parameter`. Raises KeyError."""
        return self._places[parameter, kind]

    @cached_property
    def _places(self) -> dict[tuple[str, str], State]:
        return {(state.parameter, state.kind): state for state in self.states}


def optimizer_table(table: ParameterTable, *, name: str, momentum: float) -> OptimizerTable:
    """The states that optimizer `name` keeps for the trainable entries of `table`.

    Args:
        table: the actor weights.
        name: adamw (momentum is ignored) or sgd.
        momentum: of sgd; with 0 there is no buffer.

    Raises:
        ConfigError: another name.
    """
    match name:
        case "adamw":
            kinds = ["exp_avg", "exp_avg_sq"]
        case "sgd":
            kinds = ["momentum_buffer"] if momentum else []
        case _:
            raise ConfigError("There is no such optimizer", got=name, needed="adamw or sgd")
    dtype = "float64" if table.dtype == "float64" else "float32"
    if table.dtype != dtype:
        kinds.insert(0, "master")
    states = []
    offset = _FIRST_OFFSET
    for entry in table.trainable_entries:
        size_bytes = prod(entry.shape) * ITEM_BYTES[dtype]
        for kind in kinds:
            states.append(
                State(parameter=entry.name, kind=kind, shape=entry.shape, offset=offset, size_bytes=size_bytes)
            )
            offset = align(offset + size_bytes)
    return OptimizerTable(name=name, dtype=dtype, states=tuple(states), total_bytes=offset)
