"""What a worker and the coordinator must agree on before weights are mapped: the parameter table, and who stands where.

Owns the errors of a worker that was told something else than what it finds. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollplex.errors import ModelError, StateError
from rollplex.layout.parallel.plan import DevicePlan
from rollplex.layout.parameters import ParameterTable, parameter_table
from rollplex.layout.shape import ModelShape, read_shape
from rollplex.protocol.common import ModelSpec, Parallel, Role


@dataclass(frozen=True, kw_only=True)
class AgreedModel:
    """What a model folder says, as the coordinator has it too."""

    shape: ModelShape
    table: ParameterTable
    """Of the whole model."""


def agreed_model(spec: ModelSpec) -> AgreedModel:
    """Shape and parameter table of the model that a worker is told to load.

    Raises:
        ModelError: the folder cannot be read, or the coordinator has another parameter table.
    """
    shape = read_shape(Path(spec.path))
    table = parameter_table(shape, dtype=spec.dtype, freeze_vision=spec.freeze_vision)
    if table.hash != spec.table_hash:
        raise ModelError(
            "This process and the coordinator disagree about the parameter table",
            got=table.hash,
            needed=spec.table_hash,
            do="Run the same version of Rollplex and the same model folder everywhere.",
            where=spec.path,
        )
    return AgreedModel(shape=shape, table=table)


def own_device(devices: Sequence[DevicePlan], parallel: Parallel, role: Role) -> DevicePlan:
    """What the segment of a worker's device holds.

    Args:
        devices: of the plan for both degrees.
        parallel: where the worker was told to stand.

    Raises:
        StateError: the plan gives its device another rank.
    """
    device = devices[parallel.device]
    rank = device.ranks.rollout if role is Role.ROLLOUT else device.ranks.training
    if rank != parallel.rank:
        raise StateError(
            "This process has another rank than the plan of its device",
            got=f"rank {parallel.rank} on device {parallel.device}",
            needed=f"rank {rank}",
            do="Run the same version of Rollplex everywhere.",
        )
    return device
