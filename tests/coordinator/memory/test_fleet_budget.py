"""The plan of memory of several devices: which blocks are where, what each may hold, and the refusal of the fullest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.config.wire import engine_spec
from rollplex.errors import BudgetError
from rollplex.journal.phases import Phase
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.rank import rank_shape, rank_table
from rollplex.layout.parallel.training import gradient_plan, rank_training_table, reference_plan
from rollplex.layout.parameters import gradient_table, parameter_table, reference_table
from rollplex.layout.shape import read_shape
from rollplex.memory.placement import GRANULE_BYTES
from rollplex.memory.predict import pool_kv_bytes
from rollplex.presets import write_preset
from rollplex.protocol.common import HOST_INDEX, Device, Kind, Parallel, Role
from rollplex_coordinator.decisions.fleet import fleet_of
from rollplex_coordinator.decisions.peaks import PlannedBlock
from rollplex_coordinator.dry_run import memory_report
from rollplex_coordinator.memory.budget import SEGMENTS, planned_blocks
from rollplex_coordinator.memory.device_sizes import FleetSizes, sizes_of
from rollplex_coordinator.memory.fleet_budget import NodePlan, plan_node
from rollplex_coordinator.memory.names import ROLLOUT_KV, TRAIN_WORKSPACE
from rollplex_coordinator.memory.sizes import Sizes
from support.core import AMPLE, DEVICE, check_data, make_config

TWO_BY_TWO: Mapping[str, Any] = {"devices": 4, "training": 2, "rollout": 1}
APART: Mapping[str, Any] = {
    "devices": 3,
    "training": 2,
    "rollout": 1,
    "placement": "disaggregated",
    "rollout_devices": 1,
}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("tiny-wide", tmp_path_factory.mktemp("wide"))


def planned(config: Config, budget_bytes: int = AMPLE) -> NodePlan:
    fleet = fleet_of(config)
    return plan_node(config, sizes_of(config, fleet), check_data(config), fleet, budget_bytes)


def on(plan: NodePlan, device: Device, owner: str = "") -> list[PlannedBlock]:
    return [block for block in plan.blocks if block.device == device and owner in {"", block.owner}]


def test_one_device_is_planned_as_ever(wide_folder: Path) -> None:
    config = make_config(wide_folder)
    sizes = sizes_of(config, fleet_of(config))
    assert type(sizes) is Sizes
    found = planned(config)
    assert found.blocks == planned_blocks(config, sizes, check_data(config), DEVICE)
    assert dict(found.budgets) == {DEVICE: AMPLE}
    assert sizes.segments_of(Parallel()).actor == sizes.table.total_bytes


def test_each_of_several_devices_has_the_blocks_of_its_processes_and_the_inputs_are_there_once(
    wide_folder: Path,
) -> None:
    config = make_config(wide_folder, parallel=TWO_BY_TWO)
    found = planned(config)
    first, *others = (Device(index=n) for n in range(4))
    names = [(block.kind, block.owner, block.purpose, block.size_bytes) for block in on(found, first)]
    for device in others:
        assert [(b.kind, b.owner, b.purpose, b.size_bytes) for b in on(found, device)] == names
    once = on(found, Device(index=HOST_INDEX))
    assert {block.kind for block in once} == {Kind.INPUTS}
    inputs = sum(block.size_bytes for block in once)
    assert found.budgets[Device(index=HOST_INDEX)] == inputs
    assert {found.budgets[device] for device in (first, *others)} == {(AMPLE - inputs) // 4}
    assert sorted((r.name, r.device) for r in found.reservations if r.name in {ROLLOUT_KV, TRAIN_WORKSPACE}) == sorted(
        (name, device) for name in (ROLLOUT_KV, TRAIN_WORKSPACE) for device in (first, *others)
    )


def test_a_device_that_only_samples_has_a_copy_of_the_weights_and_nothing_of_training(wide_folder: Path) -> None:
    config = make_config(wide_folder, parallel=APART)
    found = planned(config)
    trains, samples = Device(index=0), Device(index=2)
    assert not on(found, trains, Role.ROLLOUT)
    (copy,) = on(found, samples, Role.TRAINER)
    whole = parameter_table(read_shape(wide_folder), dtype=config.model.dtype, freeze_vision=config.model.freeze_vision)
    assert (copy.kind, copy.size_bytes) == (Kind.ACTOR_WEIGHTS, whole.total_bytes)
    assert {block.owner for block in on(found, samples)} == {Role.TRAINER, Role.ROLLOUT}
    assert {r.device for r in found.reservations if r.name == ROLLOUT_KV} == {samples}
    assert {r.device for r in found.reservations if r.name == TRAIN_WORKSPACE} == {trains, Device(index=1)}


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9}], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_segments_are_as_large_as_those_who_fill_them_lay_them_out(
    wide_folder: Path, dtype: str, optimizer: dict[str, Any]
) -> None:
    config = make_config(
        wide_folder, parallel=TWO_BY_TWO, model={"path": str(wide_folder), "dtype": dtype}, optimizer=optimizer
    )
    fleet, shape = fleet_of(config), read_shape(wide_folder)
    sizes = sizes_of(config, fleet)
    table = parameter_table(shape, dtype=dtype, freeze_vision=config.model.freeze_vision)
    assert sizes.table.hash == table.hash
    layout = TrainingLayout(degree=2)
    storage = plan(table, shape, layout, RolloutLayout(degree=1)).devices
    for team in fleet.trainers:
        for place in team.parallels:
            found = sizes.segments_of(place)
            assert found.actor == storage[place.device].storage.total_bytes
            assert found.gradients == gradient_plan(table, shape, layout).devices[place.rank].storage.total_bytes
            assert found.reference == reference_plan(table, shape, layout).devices[place.rank].storage.total_bytes
            shard = rank_training_table(table, shape, layout, place.rank)
            state = optimizer_table(shard, name=config.optimizer.name, momentum=config.optimizer.momentum)
            assert found.state == state.total_bytes


def test_a_planner_s_sizes_of_a_rank_are_those_of_a_run(wide_folder: Path) -> None:
    """It does not lay out every rank: a plan of a large model would take minutes."""
    config = make_config(wide_folder, parallel=TWO_BY_TWO)
    sizes = sizes_of(config, fleet_of(config))
    assert isinstance(sizes, FleetSizes)
    whole = sizes.table
    shard = rank_table(whole, read_shape(wide_folder), TrainingLayout(degree=2))
    assert sizes.gradient_bytes == gradient_table(shard).total_bytes
    assert sizes.reference_bytes == reference_table(shard).total_bytes
    by_entry = optimizer_table(shard, name=config.optimizer.name, momentum=config.optimizer.momentum).total_bytes
    assert sizes.optimizer_bytes == pytest.approx(by_entry, rel=0.05), "parts are aligned one by one"


def test_a_share_of_the_model_and_of_the_iteration_is_smaller_than_the_whole(wide_folder: Path) -> None:
    data = check_data(make_config(wide_folder))
    one = make_config(wide_folder)
    four = make_config(wide_folder, parallel={"devices": 4, "training": 4, "rollout": 4})
    many = make_config(wide_folder, parallel={"devices": 4})
    whole, shard, share = (sizes_of(config, fleet_of(config)).bounds(data) for config in (one, four, many))
    assert whole[ROLLOUT_KV] / 4 == share[ROLLOUT_KV] <= shard[ROLLOUT_KV] < whole[ROLLOUT_KV] / 3
    assert shard[Kind.INPUTS] == share[Kind.INPUTS] == whole[Kind.INPUTS]
    for name in (TRAIN_WORKSPACE, Kind.ACTOR_PREFIX_KV, Kind.PREFIX_ACTIVATIONS):
        assert shard[name] < whole[name]
        assert share[name] < whole[name]


def test_forced_lengths_are_those_of_the_whole_step(wide_folder: Path) -> None:
    """The longest response may be in the last replica's prompts."""
    lengths = [1] * 9 + [6] * 3
    rollout = {"max_new_tokens": 6, "group_size": 3, "forced_lengths": lengths}
    many = make_config(wide_folder, parallel={"devices": 4}, rollout=rollout)
    short = make_config(wide_folder, parallel={"devices": 4}, rollout={**rollout, "forced_lengths": [1] * 12})
    found, less = (sizes_of(config, fleet_of(config)).bounds(check_data(config)) for config in (many, short))
    assert found[TRAIN_WORKSPACE] > less[TRAIN_WORKSPACE]


def test_the_smallest_budget_is_accepted_and_less_is_refused_with_the_table_of_the_fullest(wide_folder: Path) -> None:
    config = make_config(wide_folder, parallel=APART)
    with pytest.raises(BudgetError) as caught:
        planned(config, 1)
    text = str(caught.value)
    found = re.search(r"at least ([\d,]+) bytes on each, in SCORE", text)
    assert found is not None, text
    assert "on each of 3 devices" in text
    assert text.count("device 0:") == 2, "where, and one table"
    inputs = sum(block.size_bytes for block in on(planned(config), Device(index=HOST_INDEX)))
    least = 3 * int(found[1].replace(",", "")) + inputs
    planned(config, least)
    with pytest.raises(BudgetError, match="short by"):
        planned(config, least - 3)
    told = re.search(r"memory\.budget to (\d+)MiB", text)
    assert told is not None
    assert least <= int(told[1]) * 2**20 < least + 2**20


def test_a_dry_run_says_what_each_device_needs_and_has(wide_folder: Path) -> None:
    config = make_config(wide_folder, parallel=APART)
    lines = dict(memory_report(planned(config), AMPLE, "all"))
    assert list(lines) == ["memory", "device 0:0", "device 0:1", "device 0:2", "host memory"]
    assert "the rest in equal shares" in lines["memory"]
    assert "nothing waits; leases may take" in lines["device 0:2"]
    (only,) = memory_report(planned(make_config(wide_folder)), AMPLE, "all")
    assert only[1].endswith("(all)")


def test_what_lives_in_a_phase_is_as_on_one_device(wide_folder: Path) -> None:
    one, four = (planned(make_config(wide_folder, parallel=p)) for p in ({}, TWO_BY_TWO))
    phases = {(block.kind, block.owner): block.phases for block in one.blocks}
    assert all(phases[block.kind, block.owner] == block.phases for block in four.blocks)
    assert Phase.TRAIN in phases[Kind.ACTOR_PREFIX_KV, Role.PREFIX]


# --- several GPUs -------------------------------------------------------------------------------------------------

GPU: Mapping[str, Any] = {"device": {"kind": "cuda"}, "model": {"dtype": "bfloat16"}}
HOST = Device(index=HOST_INDEX)


def planned_on_gpus(
    config: Config, budget_bytes: int = AMPLE, host_bytes: int = AMPLE, free_bytes: int = 0
) -> NodePlan:
    fleet, data = fleet_of(config), check_data(config)
    return plan_node(
        config, sizes_of(config, fleet), data, fleet, budget_bytes, host_bytes=host_bytes, free_bytes=free_bytes
    )


def test_of_several_gpus_each_has_an_equal_share_and_the_host_a_budget_of_its_own(wide_folder: Path) -> None:
    config = make_config(wide_folder, parallel=APART, **GPU)
    found = planned_on_gpus(config, host_bytes=77 * 2**30)
    assert dict(found.budgets) == {HOST: 77 * 2**30} | {Device(index=n): AMPLE // 3 for n in range(3)}
    assert {block.kind for block in on(found, HOST)} == {Kind.INPUTS}
    segments = [block for block in found.blocks if block.device != HOST and block.kind in SEGMENTS]
    assert {block.size_bytes % GRANULE_BYTES for block in segments} == {0}
    (copy,) = on(found, Device(index=2), Role.TRAINER)
    whole = sizes_of(config, fleet_of(config)).table.total_bytes
    assert whole <= copy.size_bytes < whole + GRANULE_BYTES, "as its lease is rounded"
    lines = dict(memory_report(found, AMPLE, "all"))
    assert lines["memory"].endswith("in equal shares")
    assert "inputs" not in lines["memory"]


def test_optimizer_states_of_all_gpus_can_lie_in_the_host_s_memory(wide_folder: Path) -> None:
    config = make_config(wide_folder, parallel=TWO_BY_TWO, memory={"optimizer": "host"}, **GPU)
    found = planned_on_gpus(config)
    states = [block for block in found.blocks if block.kind is Kind.OPTIMIZER_STATE]
    assert [block.device for block in states] == [HOST] * 4
    assert {block.size_bytes for block in states} == {sizes_of(config, fleet_of(config)).optimizer_bytes}
    host = sum(block.size_bytes for block in on(found, HOST))
    planned_on_gpus(config, host_bytes=host)
    with pytest.raises(BudgetError, match="device 0:host: .*Give the node more host memory"):
        planned_on_gpus(config, host_bytes=host - 1)


def test_gpus_that_are_too_small_are_refused_by_what_each_has_free(wide_folder: Path) -> None:
    config = make_config(wide_folder, parallel=TWO_BY_TWO, memory={"overhead": "4MiB"}, **GPU)
    with pytest.raises(BudgetError, match=r"Raise memory.budget to (\d+)MiB") as caught:
        planned_on_gpus(config, 1)
    told = re.search(r"at least ([\d,]+) bytes on each", str(caught.value))
    assert told is not None
    least = int(told[1].replace(",", ""))
    planned_on_gpus(config, 4 * least)
    with pytest.raises(BudgetError, match="Use GPUs with more memory .one of these has 1 MiB free"):
        planned_on_gpus(config, 1, free_bytes=2**20)
    with pytest.raises(BudgetError, match="Raise memory.budget"):
        planned_on_gpus(config, 1, free_bytes=least + 2**20)


def test_passes_of_ranks_are_counted_with_fused_modules_as_those_of_one_device(wide_folder: Path) -> None:
    config = make_config(wide_folder, parallel=TWO_BY_TWO, **GPU)
    assert sizes_of(config, fleet_of(config)).wants.passes.fused
    assert Sizes(config).wants.passes.fused


@pytest.mark.parametrize(
    ("parallel", "sections"),
    [
        ({"devices": 2, "training": 2, "rollout": 2}, {}),
        ({"devices": 2}, {"rollout": {"forced_lengths": [1, 1, 1, 1, 1, 1, 9, 9]}}),
        ({"devices": 2}, {"batching": {"decode_prompts": 4}}),
    ],
)
def test_an_engine_s_pool_is_leased_as_large_as_it_is_told_to_be(
    wide_folder: Path, parallel: dict[str, Any], sections: dict[str, Any]
) -> None:
    rollout = {"engine": "sglang", "group_size": 2, "max_new_tokens": 9, **sections.get("rollout", {})}
    config = make_config(
        wide_folder,
        **GPU,
        parallel=parallel,
        **{**sections, "rollout": rollout, "data": {"prompts_per_iteration": 4}},
    )
    sizes = sizes_of(config, fleet_of(config), longest_prompt=30)
    tokens = engine_spec(config, max_prompt_tokens=30).kv_tokens
    shape = rank_shape(read_shape(wide_folder), RolloutLayout(degree=config.parallel.rollout))
    assert sizes.wants.starting_pool().size_bytes == pool_kv_bytes(shape, kv_tokens=tokens, dtype="bfloat16")
