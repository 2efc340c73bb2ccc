"""Where blocks lie when the workers compute on a GPU: HBM in whole granules, host memory with a budget of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rollplex.config.wire import optimizer
from rollplex.errors import BudgetError
from rollplex.journal.events import LeaseGranted, LeaseReleased, LeaseWaiting
from rollplex.journal.phases import Phase
from rollplex.memory.cuda import CudaBackend
from rollplex.memory.cuda_driver import Driver
from rollplex.memory.placement import GRANULE_BYTES
from rollplex.memory.segment import backend
from rollplex.presets import write_preset
from rollplex.protocol.common import HOST_INDEX, Device, Kind, Memory, Role
from rollplex_coordinator.decisions.fleet import fleet_of
from rollplex_coordinator.decisions.ledger import Ledger
from rollplex_coordinator.decisions.peaks import plan_peak
from rollplex_coordinator.memory.budget import SEGMENTS, budgets_by_place, host_place, plan_memory, planned_blocks
from rollplex_coordinator.memory.device_sizes import sizes_of
from rollplex_coordinator.memory.fleet_budget import plan_node
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.memory.leasing import Memory as Blocks
from rollplex_coordinator.memory.leasing import Want
from rollplex_coordinator.memory.names import PREFIX_SCRATCH, TRAIN_SCRATCH
from rollplex_coordinator.memory.sizes import Sizes
from rollplex_coordinator.records.record import Record
from rollplex_coordinator.steps.segments import StandingSegments
from support.core import AMPLE, DEVICE, FakeJournal, check_data, make_config
from support.fake_cuda import FakeCuda

HOST = Device(node=0, index=HOST_INDEX)
CUDA = {"device": {"kind": "cuda"}, "memory": {"overhead": 0}}


class World:
    """Blocks of a node with a GPU of ten granules and host memory of a thousand bytes."""

    def __init__(self, run_dir: Path) -> None:
        self.journal = FakeJournal([])
        self.record = Record(run_dir, self.journal)  # type: ignore[arg-type] # has what Record uses of a journal
        self.cuda = FakeCuda()
        self.holder = Holder(backend("host"), {DEVICE: CudaBackend(driver=Driver(self.cuda))})
        self.ledger = Ledger({DEVICE: 10 * GRANULE_BYTES, HOST: 1000})
        self.blocks = Blocks(self.ledger, self.holder, self.record, DEVICE, HOST)
        self.blocks.enter(Phase.ROLLOUT)

    def held(self) -> dict[str, int]:
        return {str(device.device): device.held_bytes for device in self.blocks.view().devices}

    def events(self, kind: type[Any]) -> list[tuple[str, int]]:
        found: list[Any] = [event for event in self.journal.events if isinstance(event, kind)]
        return [(str(event.device), event.size_bytes) for event in found]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.holder.close_all()
    made.record.close()


def want(size_bytes: int, **changes: Any) -> Want:
    given: dict[str, Any] = {
        "kind": Kind.ACTOR_PREFIX_KV,
        "owner": Role.PREFIX,
        "last_consumer": Role.TRAINER,
        "first": Phase.ROLLOUT,
        "last": Phase.TRAIN,
        "purpose": "a block",
        "segment": True,
    }
    return Want(size_bytes=size_bytes, **{**given, **changes})


def test_segments_of_a_gpu_are_leased_in_whole_granules_and_private_memory_by_the_byte(world: World) -> None:
    segment = world.blocks.now(want(GRANULE_BYTES + 1))
    private = world.blocks.now(want(1000, segment=False))
    assert (segment.ref.size_bytes, segment.ref.memory) == (2 * GRANULE_BYTES, Memory.CUDA)
    assert private.private.size_bytes == 1000
    assert world.held() == {"0:0": 2 * GRANULE_BYTES + 1000, "0:host": 0}
    assert [len(content) for content in world.cuda.memory.values()] == [2 * GRANULE_BYTES]
    assert world.blocks.audit() == {segment.lease: (2 * GRANULE_BYTES, 2 * GRANULE_BYTES)}


def test_what_lies_on_the_host_takes_nothing_of_the_gpu_and_waits_for_the_host_alone(world: World) -> None:
    first = world.blocks.now(want(600, kind=Kind.INPUTS, on_host=True))
    assert (first.ref.size_bytes, first.ref.memory) == (600, Memory.HOST)
    assert world.held() == {"0:0": 0, "0:host": 600}
    served: list[Any] = []
    world.blocks.when_free((want(500, kind=Kind.INPUTS, on_host=True),), served.extend)
    world.blocks.now(want(9 * GRANULE_BYTES))  # nobody on the GPU waits for the host
    assert not served
    world.blocks.release(first)
    assert [block.ref.memory for block in served] == [Memory.HOST]
    assert world.events(LeaseWaiting) == [("0:host", 500)]
    assert world.events(LeaseGranted) == [("0:host", 600), ("0:0", 9 * GRANULE_BYTES), ("0:host", 500)]
    assert world.events(LeaseReleased) == [("0:host", 600)]
    assert {lease: pair[0] == pair[1] for lease, pair in world.blocks.audit().items()} == {2: True, 3: True}


def test_a_plan_for_a_gpu_has_two_places_and_rounds_as_leases_do(model_folder: Path) -> None:
    on_gpu, on_host = make_config(model_folder, **CUDA), make_config(model_folder)
    data = check_data(on_gpu)
    blocks = planned_blocks(on_gpu, Sizes(on_gpu), data, DEVICE)
    plain = planned_blocks(on_host, Sizes(on_host), data, DEVICE)
    assert {block.device for block in blocks if block.kind is Kind.INPUTS} == {HOST}
    assert {block.device for block in blocks if block.kind is not Kind.INPUTS} == {DEVICE}
    scratch = [block for block in blocks if block.purpose in {PREFIX_SCRATCH, TRAIN_SCRATCH}]
    assert [block.owner for block in scratch] == [Role.PREFIX, Role.TRAINER], "a host's is in the overhead"
    for block, same in zip([block for block in blocks if block not in scratch], plain, strict=True):
        assert same.device == DEVICE
        if block.kind in SEGMENTS:
            assert block.size_bytes % GRANULE_BYTES == 0
            assert same.size_bytes <= block.size_bytes < same.size_bytes + GRANULE_BYTES
        else:
            assert block.size_bytes == same.size_bytes
    assert host_place(on_host, DEVICE) is None
    assert budgets_by_place(on_host, DEVICE, 5, 7) == {DEVICE: 5}
    assert budgets_by_place(on_gpu, DEVICE, 5, 7) == {DEVICE: 5, HOST: 7}


def test_the_optimizer_s_state_can_lie_beside_the_gpu(model_folder: Path, world: World) -> None:
    config = make_config(model_folder, device={"kind": "cuda"}, memory={"overhead": 0, "optimizer": "host"})
    sizes, data = Sizes(config), check_data(config)
    blocks = planned_blocks(config, sizes, data, DEVICE)
    (state,) = [block for block in blocks if block.kind is Kind.OPTIMIZER_STATE]
    assert (state.device, state.size_bytes) == (HOST, sizes.optimizer_bytes)
    world.ledger = Ledger({DEVICE: 2**30, HOST: 2**30})
    memory = Blocks(world.ledger, world.holder, world.record, DEVICE, HOST)
    memory.enter(Phase.LOAD)
    made = StandingSegments(memory, sizes, fleet_of(config), reference=False).on[DEVICE]
    assert made.state is not None
    assert (made.state.memory, made.state.size_bytes) == (Memory.HOST, sizes.optimizer_bytes)
    assert made.actor.memory is Memory.CUDA
    assert optimizer(config).streamed
    assert not Sizes(make_config(model_folder, memory={"optimizer": "host"})).state_on_host, "a host has one place"


def test_either_place_can_be_too_small_and_the_refusal_says_which(model_folder: Path) -> None:
    config = make_config(model_folder, device={"kind": "cuda"}, memory={"overhead": 2**20})
    sizes, data = Sizes(config), check_data(config)
    gpu, host = plan_peak(planned_blocks(config, sizes, data, DEVICE))
    enough = {"budget_bytes": gpu.minimum_bytes, "host_bytes": host.minimum_bytes}
    assert plan_memory(config, sizes, data, DEVICE, **enough)
    with pytest.raises(BudgetError, match="device 0:0: .*Raise memory.budget to") as caught:
        plan_memory(config, sizes, data, DEVICE, **enough | {"budget_bytes": gpu.minimum_bytes - 1})
    assert "memory.overhead" in caught.value.got
    with pytest.raises(BudgetError, match="device 0:host: .*Give the node more host memory") as caught:
        plan_memory(config, sizes, data, DEVICE, **enough | {"host_bytes": host.minimum_bytes - 1})
    assert "memory.overhead" not in caught.value.got
    assert plan_memory(config, sizes, data, DEVICE, AMPLE, host_bytes=AMPLE)


# --- several GPUs -------------------------------------------------------------------------------------------------

APART = {"devices": 3, "training": 2, "placement": "disaggregated", "rollout_devices": 1}


@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_standing_segments_of_each_device_are_made_on_its_gpu_and_fit_the_plan(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, optimizer: str
) -> None:
    folder = write_preset("tiny-wide", tmp_path_factory.mktemp("wide"))
    config = make_config(
        folder, device={"kind": "cuda"}, memory={"optimizer": optimizer}, model={"dtype": "bfloat16"}, parallel=APART
    )
    fleet, data = fleet_of(config), check_data(config)
    sizes = sizes_of(config, fleet)
    plan = plan_node(config, sizes, data, fleet, AMPLE, host_bytes=AMPLE)
    drivers = {device: FakeCuda() for device in fleet.devices}
    holder = Holder(backend("host"), {d: CudaBackend(driver=Driver(driver)) for d, driver in drivers.items()})
    record = Record(tmp_path, FakeJournal([]))  # type: ignore[arg-type] # has what Record uses of a journal
    memory = Blocks(Ledger(plan.budgets), holder, record, DEVICE, HOST)
    try:
        memory.enter(Phase.LOAD)
        made = StandingSegments(memory, sizes, fleet, reference=config.needs_reference)
        for device in fleet.devices:
            ours = [ref for ref in asdict(made.on[device]).values() if ref is not None]
            on_gpu = [ref for ref in ours if ref.memory is Memory.CUDA]
            assert sorted(map(len, drivers[device].memory.values())) == sorted(ref.size_bytes for ref in on_gpu)
            planned = [b for b in plan.blocks if b.device == device and b.kind in SEGMENTS and not b.unit]
            assert memory.leased(device).segments_bytes == sum(len(x) for x in drivers[device].memory.values())
            assert memory.leased(device).segments_bytes <= sum(block.size_bytes for block in planned)
        assert len(drivers[fleet.devices[2]].memory) == 1, "only a copy of the weights"
        states = [made.on[device].state for device in fleet.training_devices]
        assert {state.memory for state in states if state} == {Memory.HOST if optimizer == "host" else Memory.CUDA}
        inputs = memory.now(want(600, kind=Kind.INPUTS, on_host=True, first=Phase.LOAD, last=Phase.DRAIN))
        assert inputs.ref.memory is Memory.HOST
        memory.enter(Phase.IDLE)  # audits sizes
    finally:
        holder.close_all()
        record.close()
