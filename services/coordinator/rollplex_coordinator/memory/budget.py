"""Whether a configuration fits, before anything is loaded: planned blocks, and the reservations that follow.

Owns which blocks a configuration will ask for and in which phases they live. Sizes come from `sizes`, arithmetic and
the table from `peaks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from rollplex.config.config import Config
from rollplex.journal.phases import WORKING_PHASES, Phase
from rollplex.memory.placement import taken_bytes
from rollplex.protocol.common import HOST_INDEX, Device, Kind, Memory, Role
from rollplex.protocol.inputs import DataChecked
from rollplex_coordinator.decisions.leases import Reservation
from rollplex_coordinator.decisions.peaks import PlannedBlock, check_fits
from rollplex_coordinator.memory.names import (
    ENGINE_SCRATCH,
    OWN_WEIGHTS,
    PREFIX_BACKWARD,
    PREFIX_SCRATCH,
    ROLLOUT_KV,
    SCORE_WORKSPACE,
    TRAIN_SCRATCH,
    TRAIN_WORKSPACE,
)
from rollplex_coordinator.memory.sizes import Sizes

ALWAYS = frozenset(WORKING_PHASES)
SEGMENTS = frozenset(
    {Kind.ACTOR_WEIGHTS, Kind.REFERENCE_WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE, Kind.ACTOR_PREFIX_KV}
)
"""What processes share on a GPU; the rest is a process's own there, or lies in host memory."""
COMPARER = "coordinator"
"""Who holds one pass's gradients during a verification."""


def plan_memory(
    config: Config,
    sizes: Sizes,
    data: DataChecked,
    device: Device,
    budget_bytes: int,
    *,
    host_bytes: int = 0,
    free_bytes: int = 0,
) -> tuple[Reservation, ...]:
    """Check that everything fits in turn.

    Args:
        config, sizes, data, device: as `planned_blocks` takes them.
        budget_bytes: what leases may take: the budget without `memory.overhead` (`rollplex.config.host.budget_bytes`).
        host_bytes: what leases may take of host memory, where `device` is a GPU.
        free_bytes: HBM that was free when the run began, there; 0: not known.

    Returns:
        The standing claims for private blocks without which work cannot go on.

    Raises:
        BudgetError: even one prefix unit at a time does not fit; shows the table.
    """
    bounds = sizes.bounds(data)
    budgets = budgets_by_place(config, device, budget_bytes, host_bytes)
    blocks = planned_blocks(config, sizes, data, device)
    check_fits(blocks, budgets, config.overhead_bytes, free_bytes=free_bytes)
    return tuple(
        Reservation(name=name, device=device, size_bytes=bounds[name], phases=phases)
        for name, _, _, phases in reserved(config, sizes)
    )


def planned_blocks(config: Config, sizes: Sizes, data: DataChecked, device: Device) -> list[PlannedBlock]:
    """Every block that the configuration will ask for, as large as it can become.

    Args:
        config: of the run.
        sizes: of its blocks.
        data: what the check of the data counted.
        device: where all of it lives but, if that is a GPU, what lies in host memory.
    """
    bounds = sizes.bounds(data)
    blocks = [
        PlannedBlock(device=device, kind=kind, owner=owner, purpose=purpose, size_bytes=size, phases=ALWAYS)
        for kind, owner, purpose, size in _standing(config, sizes, bounds[Kind.INPUTS])
    ]
    blocks += [
        PlannedBlock(device=device, kind=kind, owner=owner, purpose=name, size_bytes=bounds[name], phases=phases)
        for name, kind, owner, phases in reserved(config, sizes)
    ]
    return [_placed(config, block) for block in blocks + _units(config, sizes, device, bounds)]


def scratch_of(plan: Sequence[Reservation]) -> dict[str, int]:
    """What each worker works with beside its leases, by role: reserved, and never leased."""
    owners = {ENGINE_SCRATCH: Role.ROLLOUT, PREFIX_SCRATCH: Role.PREFIX, TRAIN_SCRATCH: Role.TRAINER}
    return {str(owners[item.name]): item.size_bytes for item in plan if item.name in owners}


def beside(device: Device) -> Device:
    """Where a node keeps what it has once, and what lies in host memory beside GPUs."""
    return Device(node=device.node, index=HOST_INDEX)


def host_place(config: Config, device: Device) -> Device | None:
    """Where a node that computes on a GPU, or on several devices, keeps what lies in host memory whatever they are;
    None: everything does, on `device`."""
    return beside(device) if config.device.kind == "cuda" or config.parallel.devices > 1 else None


def budgets_by_place(config: Config, device: Device, budget_bytes: int, host_bytes: int) -> dict[Device, int]:
    """What leases may take, for a ledger."""
    host = host_place(config, device)
    return {device: budget_bytes} if host is None else {device: budget_bytes, host: host_bytes}


def _placed(config: Config, block: PlannedBlock) -> PlannedBlock:
    """Where a block lies and what it takes there (`rollplex_coordinator.memory.leasing`)."""
    host = host_place(config, block.device)
    if host is None:
        return block
    state_apart = block.kind is Kind.OPTIMIZER_STATE and config.state_beside_gpu
    if block.kind is Kind.INPUTS or block.owner == COMPARER or state_apart:
        return replace(block, device=host)
    if block.kind in SEGMENTS:
        return replace(block, size_bytes=taken_bytes(block.size_bytes, Memory.CUDA))
    return block


def reserved(config: Config, sizes: Sizes) -> list[tuple[str, Kind, Role, frozenset[Phase]]]:
    """Private blocks without which work cannot go on: name, kind, owner, phases."""
    stream = config.run.streams
    score = frozenset({Phase.ROLLOUT, Phase.SCORE} if stream else {Phase.SCORE})
    train = score | {Phase.SCORE, Phase.TRAIN}
    sampled = frozenset({Phase.ROLLOUT, Phase.EVAL})
    if sizes.pools:
        sampled |= {Phase.LOAD}  # SGLang comes up with its pool
    found = [
        (ROLLOUT_KV, Kind.ROLLOUT_KV, Role.ROLLOUT, sampled),
        (TRAIN_WORKSPACE, Kind.WORKSPACE, Role.TRAINER, train),
    ]
    if sizes.recompute:
        found.append((PREFIX_BACKWARD, Kind.WORKSPACE, Role.PREFIX, train))
    if sizes.pools:
        found.append((ENGINE_SCRATCH, Kind.WORKSPACE, Role.ROLLOUT, sampled))
    if sizes.on_gpu:
        found.append((PREFIX_SCRATCH, Kind.WORKSPACE, Role.PREFIX, train | {Phase.ROLLOUT}))
        found.append((TRAIN_SCRATCH, Kind.WORKSPACE, Role.TRAINER, train))
    if config.needs_reference:
        found.append((SCORE_WORKSPACE, Kind.WORKSPACE, Role.PREFIX, score))
    return found


def reserved_for(
    config: Config, sizes: Sizes, schedule: Literal["serial", "overlap", "stream"]
) -> dict[str, frozenset[Phase]]:
    """The phases of reservations in a step of one schedule, where those of a run differ: never more than all need."""
    alone = config.model_copy(update={"run": config.run.model_copy(update={"schedule": schedule, "alternate": ()})})
    return {name: phases for name, _, _, phases in reserved(alone, sizes)}


def _standing(config: Config, sizes: Sizes, inputs_bytes: int) -> list[tuple[Kind, str, str, int]]:
    """What is there from LOAD to the end: kind, owner, purpose, bytes."""
    standing: list[tuple[Kind, str, str, int]] = [
        (Kind.ACTOR_WEIGHTS, Role.TRAINER, "one copy, mapped by all", sizes.weights_bytes),
        (Kind.GRADIENTS, Role.TRAINER, "of suffixes", sizes.gradient_bytes),
        (Kind.GRADIENTS, Role.PREFIX, "of prefixes", sizes.gradient_bytes),
        (Kind.OPTIMIZER_STATE, Role.TRAINER, config.optimizer.name, sizes.optimizer_bytes),
        (Kind.INPUTS, Role.INPUT, "this step", inputs_bytes),
        (Kind.INPUTS, Role.INPUT, "next step", inputs_bytes),
    ]
    if config.rollout.sglang.own_weights:
        standing.append((Kind.ACTOR_WEIGHTS, Role.ROLLOUT, OWN_WEIGHTS, sizes.rollout_weights_bytes))
    if config.eval:
        standing.append((Kind.INPUTS, Role.INPUT, "evaluation", inputs_bytes))
    if config.needs_reference:
        standing.append((Kind.REFERENCE_WEIGHTS, Role.TRAINER, "trainable parts", sizes.reference_bytes))
    if sizes.whole:
        standing.append((Kind.GRADIENTS, COMPARER, "a copy to compare with", sizes.gradient_bytes))
    return standing


def _units(config: Config, sizes: Sizes, device: Device, bounds: dict[str, int]) -> list[PlannedBlock]:
    """One entry per prefix unit of a step and model: the blocks that are asked for together."""
    score, train = frozenset({Phase.ROLLOUT, Phase.SCORE}), frozenset({Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN})
    count = -(-config.data.prompts_per_iteration // config.prefix_prompts)
    blocks = []
    for index in range(count):
        if config.needs_reference:
            blocks.append((Kind.REFERENCE_PREFIX_KV, score, f"reference prefix unit {index}"))
        if not sizes.recompute:
            blocks.append((Kind.PREFIX_ACTIVATIONS, train, f"actor prefix unit {index}"))
        blocks.append((Kind.ACTOR_PREFIX_KV, train, f"actor prefix unit {index}"))
    return [
        PlannedBlock(
            device=device,
            kind=kind,
            owner=Role.PREFIX,
            purpose=unit,
            size_bytes=bounds[kind],
            phases=phases,
            unit=unit,
        )
        for kind, phases, unit in blocks
    ]
