"""The plan of a node's memory: of one device that of `budget`; of several the same, for the processes that each has.

    host memory   budget ─► what the node has once (inputs) ─► the rest in equal shares, one for each device
    GPUs          budget ─► equal shares; what lies in host memory has a budget of its own, as beside one GPU

Owns which blocks are on which of several devices, and what each may hold. What the blocks are is `budget`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from rollplex.config.config import Config
from rollplex.memory.placement import taken_bytes
from rollplex.protocol.common import Device, Kind, Memory, Role
from rollplex.protocol.inputs import DataChecked
from rollplex_coordinator.decisions.fleet import DEVICE, Fleet
from rollplex_coordinator.decisions.leases import Reservation
from rollplex_coordinator.decisions.peaks import PlannedBlock, check_fits, check_shares_fit
from rollplex_coordinator.memory.budget import beside, budgets_by_place, plan_memory, planned_blocks, reserved
from rollplex_coordinator.memory.device_sizes import share
from rollplex_coordinator.memory.sizes import Sizes

COPY = "a copy that is sampled from"


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """What a run will ask for, where, and what it may have."""

    budgets: Mapping[Device, int]
    """Bytes that leases may take, by place."""
    blocks: Sequence[PlannedBlock]
    reservations: Sequence[Reservation]
    once_bytes: int = 0
    """What several devices of host memory have once, of the budget that they share."""


def plan_node(
    config: Config,
    sizes: Sizes,
    data: DataChecked,
    fleet: Fleet,
    budget_bytes: int,
    *,
    host_bytes: int = 0,
    free_bytes: int = 0,
) -> NodePlan:
    """Check that everything fits in turn.

    Args:
        budget_bytes: what leases may take on all devices: the budget without `memory.overhead`.
        host_bytes, free_bytes: as `plan_memory` takes them; only of GPUs. free_bytes: of each.

    Raises:
        BudgetError: a device cannot hold even one prefix unit at a time, or the host what lies there; shows the table,
            of several devices that of the fullest.
    """
    if fleet.single:
        return NodePlan(
            budgets=budgets_by_place(config, DEVICE, budget_bytes, host_bytes),
            blocks=planned_blocks(config, sizes, data, DEVICE),
            reservations=plan_memory(
                config, sizes, data, DEVICE, budget_bytes, host_bytes=host_bytes, free_bytes=free_bytes
            ),
        )
    blocks = fleet_blocks(config, sizes, data, fleet)
    on_gpus = config.device.kind == "cuda"
    budgets = fleet_budgets(blocks, fleet, budget_bytes, host_bytes=host_bytes if on_gpus else None)
    once_bytes = 0 if on_gpus else budgets[beside(DEVICE)]
    check_shares_fit(
        blocks, budgets, fleet.devices, config.overhead_bytes, once_bytes=once_bytes, free_bytes=free_bytes
    )
    check_fits([block for block in blocks if block.device == beside(DEVICE)], budgets)
    bounds = sizes.bounds(data)
    return NodePlan(
        budgets=budgets,
        blocks=blocks,
        reservations=tuple(
            Reservation(name=name, device=device, size_bytes=bounds[name], phases=phases)
            for device in fleet.devices
            for name, _, role, phases in reserved(config, sizes)
            if device in fleet.devices_of(role)
        ),
        once_bytes=once_bytes,
    )


def fleet_blocks(config: Config, sizes: Sizes, data: DataChecked, fleet: Fleet) -> list[PlannedBlock]:
    """Every block of several devices, and of the place beside them (`budget.beside`)."""
    shared, kind = share(config, len(fleet.trainers)), Memory(config.device.kind)
    blocks: list[PlannedBlock] = []
    for device in fleet.devices:
        planned = planned_blocks(shared, sizes, data, device)
        owners = {role for role in (Role.TRAINER, Role.PREFIX, Role.ROLLOUT) if device in fleet.devices_of(role)}
        blocks += [block for block in planned if block.owner in owners]
        if Role.TRAINER not in owners:
            actor = sizes.segments_of(fleet.team_of(Role.ROLLOUT, device).parallels[0]).actor
            (weights,) = [x for x in planned if x.kind is Kind.ACTOR_WEIGHTS and x.owner == Role.TRAINER]
            blocks.append(replace(weights, purpose=COPY, size_bytes=taken_bytes(actor, kind)))
        if device == fleet.devices[0]:
            once = [block for block in planned if block.kind is Kind.INPUTS]
            blocks += [replace(block, device=beside(device)) for block in once]
    return blocks


def fleet_budgets(
    blocks: Sequence[PlannedBlock], fleet: Fleet, budget_bytes: int, *, host_bytes: int | None = None
) -> dict[Device, int]:
    """What leases may take of each device and of the place beside them.

    Args:
        blocks: of `fleet_blocks`.
        budget_bytes: of the node, without `memory.overhead`.
        host_bytes: of the place beside GPUs; None: the devices are of host memory, and share with it.
    """
    once = beside(fleet.devices[0])
    if host_bytes is None:
        inputs = sum(block.size_bytes for block in blocks if block.device == once)
        return {once: inputs} | dict.fromkeys(fleet.devices, max(0, budget_bytes - inputs) // len(fleet.devices))
    return {once: host_bytes} | dict.fromkeys(fleet.devices, budget_bytes // len(fleet.devices))
