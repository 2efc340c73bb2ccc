"""How many bytes of a model a device aliases, refreshes and rebuilds under two layouts.

Owns: the sums. Does not know: how they are shown (`document`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import Alias, DevicePlan, Rebuild, Refresh, plan
from rollplex.layout.parameters import ParameterTable, align, parameter_table
from rollplex.layout.shape import ModelShape

_LAYER: Final = re.compile(r"\b(layers|blocks)\.\d+\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """Bytes of one device."""

    training: int
    """Of the training layout's parameters."""
    rollout: int
    """Of the rollout layout's: aliased, refreshed and rebuilt ones."""
    aliased: int
    refreshed: int
    rebuilt: int
    stored: int
    """Of the segment that serves both, alignment included."""

    @property
    def copied(self) -> int:
        """After each update, with everything trainable."""
        return self.refreshed + self.rebuilt


def tally_model(shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, *, dtype: str) -> Tally:
    """Of the device that copies most, with the whole model trainable.

    Layers of one kind are alike, so one of each is planned and counted as often as there are layers.

    Raises:
        ConfigError: as `plan`.
    """
    table, times = _one_of_each(shape, dtype)
    group = plan(table, shape, training, rollout)
    tallies = [tally(device, times, header_bytes=table.header_bytes) for device in group.devices]
    return max(tallies, key=lambda one: one.copied)


def tally(device: DevicePlan, times: Mapping[str, int] | None = None, *, header_bytes: int) -> Tally:
    """Of one device. times: how often an entry counts, by SGLang's name; all once unless given."""
    often: Mapping[str, int] = times or {parameter.name: 1 for parameter in device.rollout}
    sums = Counter[type[Alias | Refresh | Rebuild]]()
    for parameter in device.rollout:
        for piece in parameter.pieces:
            sums[type(piece.holding)] += piece.size_bytes * often[parameter.name]
    held = [*device.storage.shared, *(copy for copy in device.storage.copies if copy is not None)]
    return Tally(
        training=sum(p.size_bytes * often[p.stored.name] for p in device.training),
        rollout=sum(p.size_bytes * often[p.name] for p in device.rollout),
        aliased=sums[Alias],
        refreshed=sums[Refresh],
        rebuilt=sums[Rebuild],
        stored=align(header_bytes) + sum(align(stored.size_bytes) * often[stored.name] for stored in held),
    )


@cache
def _one_of_each(shape: ModelShape, dtype: str) -> tuple[ParameterTable, Mapping[str, int]]:
    """The table with the first layer of each tower only, and how many layers each entry stands for."""
    table = parameter_table(shape, dtype=dtype, freeze_vision=False)
    kinds = {entry.name: _LAYER.sub(r"\1.N.", entry.name) for entry in table.entries}
    alike = Counter(kinds.values())
    first = {kinds[entry.name]: entry for entry in reversed(table.entries)}
    entries = tuple(reversed(first.values()))
    return replace(table, entries=entries), {entry.name: alike[kind] for kind, entry in first.items()}
