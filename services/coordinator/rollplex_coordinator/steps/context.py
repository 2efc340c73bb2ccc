"""What the parts of a running node share. Holds, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rollplex.config.config import Config
from rollplex.multiprocessors.beside import Notice, Silent
from rollplex.protocol.common import Device
from rollplex.protocol.inputs import DataChecked
from rollplex.protocol.rollout import Sampling
from rollplex_coordinator.decisions.fleet import SINGLE, Fleet
from rollplex_coordinator.decisions.gate import Gate
from rollplex_coordinator.decisions.window import Window
from rollplex_coordinator.memory.leasing import Memory
from rollplex_coordinator.memory.sizes import Sizes
from rollplex_coordinator.processes.link import Link
from rollplex_coordinator.records.record import Record
from rollplex_coordinator.steps.feed import Feed
from rollplex_coordinator.steps.loads import Loads
from rollplex_coordinator.steps.sampling import Samples


@dataclass(kw_only=True)
class Context:
    """One loaded node, ready for steps.

    Args:
        fleet: which workers there are, and which of them work together.
        window: who keeps to which share of the device.
        notice: where it is said whether prefix work runs beside the rollout.
        loads: what has every worker load; None in tests that have none.
        digests: of the weights as the journal has them last, of each device that trains.
        fingerprints: of what the configuration only names (`rollplex.checkpoint.state.RunState`).
    """

    config: Config
    run_dir: Path
    link: Link
    memory: Memory
    record: Record
    feed: Feed
    samples: Samples
    gate: Gate
    sizes: Sizes
    data: DataChecked
    sampling: Sampling
    fleet: Fleet = SINGLE
    window: Window = field(default_factory=Window)
    notice: Notice = field(default_factory=Silent)
    loads: Loads | None = None
    digests: dict[Device, str] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)

    @property
    def unit_s(self) -> float:
        """Deadline of one unit of work, from any progress on."""
        return self.config.deadlines.unit_s

    @property
    def reward_s(self) -> float:
        """Deadline of one group's rewards: the child enforces the limit itself; this is for a child that cannot."""
        return self.config.rewards.time_limit_s + self.config.deadlines.ack_s
