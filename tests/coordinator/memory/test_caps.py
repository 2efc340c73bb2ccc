"""The cap of each worker's allocator: everything that it can be leased at once fits under it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.journal.phases import Phase
from rollplex.presets import write_preset
from rollplex.protocol.common import Device, Kind, Role
from rollplex_coordinator.decisions.fleet import fleet_of
from rollplex_coordinator.decisions.peaks import PlannedBlock
from rollplex_coordinator.memory.budget import planned_blocks
from rollplex_coordinator.memory.caps import (
    ALLOCATOR_SLACK_BYTES,
    ENGINE_SLACK_BYTES,
    LOGIT_BYTES,
    PRIVATE,
    STREAMED_COPIES,
    UPDATE_CHUNK_BYTES,
    Caps,
    caps_by_device,
    leased_at_once,
    private_caps,
    update_bytes,
)
from rollplex_coordinator.memory.device_sizes import sizes_of
from rollplex_coordinator.memory.fleet_budget import plan_node
from rollplex_coordinator.memory.names import ROLLOUT_KV, TRAIN_SCRATCH, TRAIN_WORKSPACE
from rollplex_coordinator.memory.sizes import Sizes
from support.core import AMPLE, DEVICE, check_data, make_config

CUDA = {"kind": "cuda"}


def block(
    kind: Kind, size: int, *, owner: str = "prefix", phase: Phase = Phase.ROLLOUT, unit: str = ""
) -> PlannedBlock:
    return PlannedBlock(
        device=Device(), kind=kind, owner=owner, purpose="", size_bytes=size, phases=frozenset({phase}), unit=unit
    )


def caps_of(config: Config, budget_bytes: int = AMPLE) -> tuple[Caps, Sizes, list[PlannedBlock]]:
    sizes = Sizes(config)
    blocks = planned_blocks(config, sizes, check_data(config), DEVICE)
    return private_caps(config, blocks, sizes.table, 1000, budget_bytes), sizes, blocks


def test_private_blocks_of_a_phase_add_up_and_the_worst_phase_counts() -> None:
    blocks = [
        block(Kind.PREFIX_ACTIVATIONS, 10, unit="a"),
        block(Kind.PREFIX_ACTIVATIONS, 20, unit="b"),
        block(Kind.WORKSPACE, 25, phase=Phase.SCORE),
        block(Kind.ACTOR_PREFIX_KV, 1000, unit="a"),
        block(Kind.WORKSPACE, 500, owner="trainer"),
    ]
    assert leased_at_once(blocks, Role.PREFIX, 10_000) == 30
    assert leased_at_once(blocks, Role.TRAINER, 10_000) == 500
    assert leased_at_once(blocks, Role.ROLLOUT, 10_000) == 0


def test_units_that_cannot_all_be_alive_under_the_budget_are_not_counted() -> None:
    blocks = [block(Kind.PREFIX_ACTIVATIONS, 10, unit=str(i)) for i in range(100)]
    blocks.append(block(Kind.ACTOR_WEIGHTS, 300, owner="trainer"))
    assert leased_at_once(blocks, Role.PREFIX, 500) == 200
    assert leased_at_once(blocks, Role.PREFIX, 100) == 0


def test_on_host_memory_nobody_has_a_cap(model_folder: Path) -> None:
    assert caps_of(make_config(model_folder))[0] == Caps()


@pytest.mark.parametrize(
    "sections", [{}, {"memory": {"prefix_activations": "recompute"}}, {"run": {"schedule": "stream"}}]
)
def test_all_that_a_role_is_planned_to_hold_in_a_phase_fits_under_its_cap(
    model_folder: Path, sections: dict[str, Any]
) -> None:
    caps, _, blocks = caps_of(make_config(model_folder, device=CUDA, **sections))
    for role, cap in ((Role.PREFIX, caps.prefix), (Role.TRAINER, caps.trainer), (Role.ROLLOUT, caps.rollout)):
        for phase in Phase:
            held = [b for b in blocks if b.owner == role and b.kind in PRIVATE and phase in b.phases]
            assert sum(b.size_bytes for b in held) + min(ALLOCATOR_SLACK_BYTES, ENGINE_SLACK_BYTES) <= cap, (
                role,
                phase,
            )


def test_the_trainer_s_cap_covers_the_larger_of_a_unit_and_the_update(model_folder: Path) -> None:
    config = make_config(model_folder, device=CUDA)
    caps, sizes, _ = caps_of(config)
    bounds = sizes.bounds(check_data(config))
    unit = bounds[TRAIN_WORKSPACE] + bounds[TRAIN_SCRATCH]
    assert caps.trainer == max(unit, update_bytes(sizes.table)) + ALLOCATOR_SLACK_BYTES


def test_only_bfloat16_weights_need_copies_of_their_gradients(model_folder: Path) -> None:
    assert update_bytes(Sizes(make_config(model_folder)).table) == 0
    half = Sizes(make_config(model_folder, model={"dtype": "bfloat16"})).table
    assert update_bytes(half) == 64 * 2**20 + 2 * max(entry.size_bytes for entry in half.trainable_entries)


def test_state_that_passes_through_is_counted_in_pieces(model_folder: Path) -> None:
    config = make_config(model_folder, device=CUDA, memory={"optimizer": "host"})
    table = Sizes(config).table
    assert update_bytes(table, streamed=True) == STREAMED_COPIES * UPDATE_CHUNK_BYTES
    caps, sizes, _ = caps_of(config)
    bounds = sizes.bounds(check_data(config))
    unit = bounds[TRAIN_WORKSPACE] + bounds[TRAIN_SCRATCH]
    assert caps.trainer == max(unit, update_bytes(table, streamed=True)) + ALLOCATOR_SLACK_BYTES


def test_sglang_s_pool_is_beside_its_cap(model_folder: Path) -> None:
    sglang = {"engine": "sglang", "sglang": {"max_running": 64}}
    config = make_config(model_folder, device=CUDA, model={"dtype": "bfloat16"}, rollout=sglang)
    assert caps_of(config)[0].rollout == ENGINE_SLACK_BYTES + 64 * 1000 * LOGIT_BYTES


def test_each_device_has_the_caps_of_its_own_blocks_and_share(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_preset("tiny-wide", tmp_path_factory.mktemp("wide"))
    parallel = {"devices": 3, "training": 2, "placement": "disaggregated", "rollout_devices": 1}
    config = make_config(folder, device=CUDA, model={"dtype": "bfloat16"}, parallel=parallel)
    fleet = fleet_of(config)
    sizes, data = sizes_of(config, fleet), check_data(config)
    plan = plan_node(config, sizes, data, fleet, AMPLE, host_bytes=AMPLE)
    found = caps_by_device(config, plan, sizes)
    assert list(found) == list(fleet.devices), "host memory has none"
    bounds = sizes.bounds(data)
    unit = bounds[TRAIN_WORKSPACE] + bounds[TRAIN_SCRATCH]
    assert found[fleet.devices[0]] == found[fleet.devices[1]]
    assert found[fleet.devices[0]].trainer == max(unit, update_bytes(sizes.trained)) + ALLOCATOR_SLACK_BYTES
    assert sizes.trained.total_bytes < sizes.table.total_bytes, "a shard is stepped"
    of_prefix = leased_at_once([b for b in plan.blocks if b.device == fleet.devices[0]], Role.PREFIX, AMPLE // 3)
    assert found[fleet.devices[0]].prefix == of_prefix + ALLOCATOR_SLACK_BYTES
    apart = found[fleet.devices[2]]
    assert apart.prefix == ALLOCATOR_SLACK_BYTES, "nobody of that role is there"
    assert apart.rollout - found[fleet.devices[0]].rollout == sizes.bounds(data)[ROLLOUT_KV]


def test_on_one_device_the_caps_are_those_of_all_blocks(model_folder: Path) -> None:
    config = make_config(model_folder, device=CUDA)
    sizes, data = Sizes(config), check_data(config)
    plan = plan_node(config, sizes, data, fleet_of(config), AMPLE, host_bytes=AMPLE)
    blocks = [one for one in plan.blocks if one.device == DEVICE]
    assert caps_by_device(config, plan, sizes) == {
        DEVICE: private_caps(config, blocks, sizes.table, sizes.wants.passes.shape.vocab, AMPLE)
    }
