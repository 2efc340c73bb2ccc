"""The segments that are there from LOAD to the end: made on each device, and who is told of which.

    device that trains      actor weights, reference, two gradient arenas, optimizer state
    device that samples     actor weights: those of the trainer there, or a copy that trainers of replica 0 fill

Owns which segments a trainer may read beside its own (`Shards`). Does not know: messages, what is in a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from rollplex.journal.phases import Phase
from rollplex.protocol.common import Device, Kind, Parallel, Role, SegmentRef
from rollplex.protocol.trainer import Shards, Target
from rollplex_coordinator.decisions.fleet import Fleet, Team
from rollplex_coordinator.memory.leasing import Memory, Want
from rollplex_coordinator.memory.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class DeviceSegments:
    """Of one device. All but the actor weights: None where nothing is trained, the reference also where there is no
    divergence term."""

    actor: SegmentRef
    reference: SegmentRef | None = None
    gradients: SegmentRef | None = None
    prefix_gradients: SegmentRef | None = None
    state: SegmentRef | None = None


class StandingSegments:
    """Of all devices."""

    def __init__(self, memory: Memory, sizes: Sizes, fleet: Fleet, *, reference: bool) -> None:
        """Make them.

        Args:
            reference: whether there is a reference model.
        """
        self.fleet = fleet
        self.on: dict[Device, DeviceSegments] = {}
        """By device."""
        for device in fleet.devices:
            self.on[device] = _make(memory, sizes, fleet, device, reference=reference)

    def shards(self, team: Team, rank: int) -> Shards:
        """What a trainer reads, and fills, beside its own segments."""
        fleet = self.fleet
        if fleet.single:
            return Shards()
        own = [self.on[device] for device in team.devices]
        return Shards(
            actors=tuple(self.on[device].actor for device in fleet.plan_group(team.devices[rank])),
            gradients=tuple(one.gradients for one in own if one.gradients is not None),
            states=tuple(one.state for one in own if one.state is not None),
            targets=tuple(self._target(device) for device in _targets(fleet, team, rank)),
        )

    def _target(self, device: Device) -> Target:
        return Target(actor=self.on[device].actor, parallel=_parallel(self.fleet, Role.ROLLOUT, device))


def standing(kind: Kind, size_bytes: int, owner: Role, last_consumer: Role) -> Want:
    """A segment that lives from LOAD to the end."""
    return Want(
        kind=kind,
        size_bytes=size_bytes,
        owner=owner,
        last_consumer=last_consumer,
        first=Phase.LOAD,
        last=Phase.DRAIN,
        purpose=f"{kind} of {owner}",
        segment=True,
    )


def _make(memory: Memory, sizes: Sizes, fleet: Fleet, device: Device, *, reference: bool) -> DeviceSegments:
    def make(kind: Kind, size_bytes: int, owner: Role, last_consumer: Role) -> SegmentRef:
        on_host = kind is Kind.OPTIMIZER_STATE and sizes.state_on_host
        return memory.now(replace(standing(kind, size_bytes, owner, last_consumer), on_host=on_host), (device,)).ref

    trains = device in fleet.training_devices
    size = sizes.segments_of(_parallel(fleet, Role.TRAINER if trains else Role.ROLLOUT, device))
    actor = make(Kind.ACTOR_WEIGHTS, size.actor, Role.TRAINER, Role.ROLLOUT)
    if not trains:
        return DeviceSegments(actor=actor)
    return DeviceSegments(
        actor=actor,
        reference=make(Kind.REFERENCE_WEIGHTS, size.reference, Role.TRAINER, Role.PREFIX) if reference else None,
        gradients=make(Kind.GRADIENTS, size.gradients, Role.TRAINER, Role.TRAINER),
        prefix_gradients=make(Kind.GRADIENTS, size.gradients, Role.PREFIX, Role.TRAINER),
        state=make(Kind.OPTIMIZER_STATE, size.state, Role.TRAINER, Role.TRAINER),
    )


def _parallel(fleet: Fleet, role: Role, device: Device) -> Parallel:
    team = fleet.team_of(role, device)
    return team.parallels[team.devices.index(device)]


def _targets(fleet: Fleet, team: Team, rank: int) -> list[Device]:
    """The devices that only sample are shared out to the ranks of replica 0, in turn."""
    copies = [device for device in fleet.devices if device not in fleet.training_devices]
    return copies[rank :: len(team.devices)] if team.index == 0 else []
