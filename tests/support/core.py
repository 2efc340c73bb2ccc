"""A coordinator's core in one process: real ledger, holder, gate, record, sizes and link; workers from `workers`, GPUs
from `fake_cuda`."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from msgspec.structs import replace

from rollplex.config import Config, from_mapping
from rollplex.config.wire import train_sampling
from rollplex.errors import BudgetError
from rollplex.journal.events import Event
from rollplex.journal.phases import Phase
from rollplex.memory.cuda import CudaBackend
from rollplex.memory.cuda_driver import Driver
from rollplex.memory.segment import backend
from rollplex.protocol.common import Device, Kind, LeaseRef, Role, SegmentRef
from rollplex.protocol.common import Memory as MemoryKind
from rollplex.protocol.inputs import DataChecked, SourceChecked
from rollplex_coordinator.decisions.fleet import fleet_of
from rollplex_coordinator.decisions.gate import Gate
from rollplex_coordinator.decisions.instructions import Mode
from rollplex_coordinator.decisions.ledger import Ledger
from rollplex_coordinator.decisions.plan import StepPlan, plan_step
from rollplex_coordinator.decisions.schedule import Schedule
from rollplex_coordinator.memory.budget import host_place, plan_memory
from rollplex_coordinator.memory.device_sizes import sizes_of
from rollplex_coordinator.memory.fleet_budget import plan_node
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.memory.leasing import Memory
from rollplex_coordinator.memory.sizes import Sizes
from rollplex_coordinator.processes.link import Link
from rollplex_coordinator.records.record import Record
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.feed import Feed, StepInputs
from rollplex_coordinator.steps.sampling import Samples
from rollplex_coordinator.steps.segments import standing
from rollplex_coordinator.steps.step import TrainStep
from support.fake_cuda import FakeCuda
from support.workers import ROW_WIDTH, STOP_ID, FakeHub, Workers, named, prompts_of

DEVICE = Device()
AMPLE = 2**40
NUM_ROWS = 30


class FakeJournal:
    """Notes events; durable ones also in the story, where their place among the messages shows."""

    buffered = 0

    def __init__(self, story: list[tuple[Any, ...]]) -> None:
        self.events: list[Event] = []
        self._story = story

    def append(self, event: Event) -> int:
        self.events.append(event)
        return len(self.events)

    def append_durable(self, event: Event) -> int:
        self._story.append(("durable", event))
        return self.append(event)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class NoSupervisor:
    """Nobody's children."""

    def exit_text(self, role: Role, device: Device = Device()) -> str:  # noqa: B008 - immutable
        return ""

    def log_text(self, role: Role, device: Device = Device()) -> str:  # noqa: B008 - immutable
        return f"logs/{role}.log"


def make_config(folder: Path, **sections: Any) -> Config:
    """A small configuration with some keys replaced: make_config(folder, run={"schedule": "serial"})."""
    values: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"path": "rows.jsonl", "prompts_per_iteration": 4},
        "rollout": {"group_size": 3, "max_new_tokens": 6},
        "rewards": {"functions": [{"function": "score.py:score"}]},
        "memory": {"overhead": 0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return from_mapping(values)


def check_data(config: Config) -> DataChecked:
    """What the input child would find in `prompts_of` the rows 0 to NUM_ROWS - 1, for every source."""
    slots, _ = prompts_of(tuple(range(NUM_ROWS)))
    names = ("train", *(section.name for section in config.eval))
    sources = tuple(
        SourceChecked(
            name=name,
            fingerprint=f"rows of {name}",
            num_rows=NUM_ROWS,
            good_rows=None,
            rejected=(),
            max_prompt_tokens=max(slot.tokens for slot in slots),
            max_media_rows=max(slot.media_rows for slot in slots),
            max_media_tokens=max(slot.media_rows // 4 for slot in slots),
        )
        for name in names
    )
    return DataChecked(cause=1, sources=sources, never_sampled=(1, 2), stop_ids=(STOP_ID,), row_width=ROW_WIDTH)


def minimum_bytes(folder: Path, sections: dict[str, Any]) -> int:
    """The smallest budget that the plan of memory accepts, as its refusal says."""
    return minimum_of(make_config(folder, **sections))


def minimum_of(config: Config, *, whole: bool = False) -> int:
    """The same of a configuration; whole: for a verification."""
    with pytest.raises(BudgetError) as caught:
        plan_memory(config, Sizes(config, whole=whole), check_data(config), DEVICE, 1)
    found = re.search(r"at least ([\d,]+) bytes", str(caught.value))
    assert found is not None, str(caught.value)
    return int(found[1].replace(",", ""))


class Core:
    """One loaded node.

    Args:
        config: of `make_config`.
        run_dir: an empty folder.
        rng: decides who answers next, and what.
        budget_bytes: for all leases.
        whole: memory is planned for a verification.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        rng: random.Random | None = None,
        budget_bytes: int = AMPLE,
        *,
        whole: bool = False,
    ) -> None:
        rng = rng or random.Random(0)
        self.story: list[tuple[Any, ...]] = []
        self.journal = FakeJournal(self.story)
        journal: Any = self.journal  # has what Record uses of a journal
        self.record = Record(run_dir, journal, tensorboard=config.run.tensorboard)
        self.fleet, kind = fleet_of(config), MemoryKind(config.device.kind)
        on_gpus = kind is MemoryKind.CUDA
        self.gpus = {device: FakeCuda() for device in self.fleet.devices if on_gpus}
        """What is asked of the driver for each device's memory; empty on hosts."""
        backends = {device: CudaBackend(driver=Driver(fake)) for device, fake in self.gpus.items()}
        self.holder = Holder(backend("host"), backends)
        self.data = check_data(config)
        longest = max(source.max_prompt_tokens for source in self.data.sources)
        self.sizes = sizes_of(config, self.fleet, whole=whole, longest_prompt=longest)
        host_bytes = AMPLE if on_gpus else 0
        planned = plan_node(config, self.sizes, self.data, self.fleet, budget_bytes, host_bytes=host_bytes)
        self.ledger = Ledger(planned.budgets)
        host = host_place(config, DEVICE)
        self.memory = Memory(self.ledger, self.holder, self.record, DEVICE, host, kind=kind)
        for reservation in planned.reservations:
            self.ledger.reserve(reservation)
        self.workers = Workers(rng)
        self.hub = FakeHub(self.workers, rng, self._check, self.story, self.fleet)
        self.link = Link(self.hub, NoSupervisor(), 10.0, clock=lambda: 0.0, fleet=self.fleet)  # type: ignore[arg-type] # fakes
        self.link.await_peers(Role, 10.0)
        self.memory.enter(Phase.LOAD)
        self._lease_what_stays(config)
        gate = Gate()
        for role in (Role.PREFIX, Role.ROLLOUT):
            gate.register_reader(role, on_policy=True)
        self.context = Context(
            config=config,
            run_dir=run_dir,
            link=self.link,
            memory=self.memory,
            record=self.record,
            feed=Feed(self.link, self.memory, config.deadlines.unit_s),
            samples=Samples(self.link, self.record, config.run, config.deadlines.unit_s),
            gate=gate,
            sizes=self.sizes,
            data=self.data,
            sampling=train_sampling(config, stop_ids=self.data.stop_ids),
            fleet=self.fleet,
        )
        self.record.enter(Phase.IDLE)
        self.memory.enter(Phase.IDLE)
        self.story.clear()

    def _lease_what_stays(self, config: Config) -> None:
        """Books only: nobody reads these segments here."""
        sizes = self.sizes
        stays = [
            standing(Kind.ACTOR_WEIGHTS, sizes.table.total_bytes, Role.TRAINER, Role.ROLLOUT),
            standing(Kind.GRADIENTS, sizes.gradient_bytes, Role.TRAINER, Role.TRAINER),
            standing(Kind.GRADIENTS, sizes.gradient_bytes, Role.PREFIX, Role.TRAINER),
            standing(Kind.OPTIMIZER_STATE, sizes.optimizer_bytes, Role.TRAINER, Role.TRAINER),
        ]
        if config.needs_reference:
            stays.append(standing(Kind.REFERENCE_WEIGHTS, sizes.reference_bytes, Role.TRAINER, Role.PREFIX))
        devices = self.fleet.training_devices
        self.standing = {
            block.lease
            for want in stays
            for block in self.memory.now(replace(want, segment=False), devices=devices).blocks
        }

    def _check(self, message: Any) -> None:
        """Every lease and segment that a message names is there, of that kind and size."""
        leases = {lease.id: lease for device in self.memory.view().devices for lease in device.leases}
        for ref in named(message, LeaseRef):
            lease = leases[ref.lease]
            assert (lease.kind, lease.size_bytes, lease.segment) == (ref.kind, ref.size_bytes, False), message
        for ref in named(message, SegmentRef):
            held = self.holder.find(ref.segment)
            assert held is not None, message
            assert held.ref == ref, message
            assert leases[held.lease].size_bytes == ref.size_bytes, message

    # --- for tests ------------------------------------------------------------------------------------------------

    def sent(self, kind: type[Any]) -> list[Any]:
        """Messages of a type, in the order in which they were sent."""
        return [entry[2] for entry in self.story if entry[0] == "send" and isinstance(entry[2], kind)]

    def events(self, kind: type[Any]) -> list[Any]:
        """Journalled events of a type."""
        return [event for event in self.journal.events if isinstance(event, kind)]

    def plan(self, num_groups: int) -> StepPlan:
        config = self.context.config
        return plan_step(
            num_groups,
            decode_prompts=config.decode_prompts,
            prefix_prompts=config.prefix_prompts,
            suffix_prompts=config.suffix_prompts,
            engines=len(self.fleet.engines),
            replicas=len(self.fleet.trainers),
        )

    def begin(self, rows: tuple[int, ...], step: int = 0) -> tuple[TrainStep, StepInputs]:
        """A step that is ready to run."""
        c, config = self.context, self.context.config
        c.record.step = step
        c.feed.prepare(step, "train", rows)
        inputs = c.feed.take(step)
        plan = self.plan(len(rows))
        c.gate.begin_step(step, plan.num_groups, [unit.groups for unit in plan.prefix])
        schedule = Schedule(
            plan,
            Mode(config.run.schedule),
            reference=config.needs_reference,
            batch_rewards=config.algorithm.scale_rewards == "batch",
            after_prefill=config.device.window == "decode",
        )
        return TrainStep(c, plan, schedule, inputs), inputs

    @property
    def leased(self) -> set[int]:
        """Leases beside those that stay."""
        live = {lease.id for device in self.memory.view().devices for lease in device.leases}
        return live - self.standing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.holder.close_all()
        self.record.close()
