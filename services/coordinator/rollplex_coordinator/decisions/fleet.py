"""Which processes there are on which devices, and who works together. Pure: a function of the configuration.

team      processes of one role that compute the same batches together, each on a device of its own: the ranks of a
          tensor-parallel group; most often one process
replicas  teams of trainer and of prefix with other prompts; the same devices make one of each
engines   teams of the rollout

devices        0   1   2   3      training 2, rollout 1: two layout groups of two devices
trainer        0.0 0.1 1.0 1.1    replica.rank; prefix the same
rollout        0.0 1.0 2.0 3.0    engine.rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_team

from msgspec.structs import replace

from rollplex.config.config import Config
from rollplex.layout.parallel.degrees import Ranks, RolloutLayout, TrainingLayout, group
from rollplex.protocol.common import Device, Parallel, Role

DEVICE = Device(node=0, index=0)
"""The first device; input and reward child count as being there."""
WORKERS = (Role.TRAINER, Role.PREFIX, Role.ROLLOUT)
"""The roles of which each device can have a process."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """Processes of one role that are always instructed together."""

    role: Role
    index: int
    """Replica or engine."""
    devices: tuple[Device, ...]
    """By rank."""
    parallels: tuple[Parallel, ...]
    """By rank, without `meet` and deadline (`met`)."""

    @property
    def leader(self) -> Device:
        """Of rank 0, whose answers count where all ranks have the same."""
        return self.devices[0]

    def only(self, rank: int) -> Team:
        """One of its processes, for what the others have no part in."""
        return replace_team(self, devices=(self.devices[rank],), parallels=(self.parallels[rank],))

    def met(self, rank: int, meet: str, collective_s: float) -> Parallel:
        """What rank `rank` is told; of a process that is alone nothing to meet by."""
        parallel = self.parallels[rank]
        world = len(self.devices) * parallel.replicas
        return replace(parallel, meet=meet if world > 1 else "", collective_s=collective_s)

    def __str__(self) -> str:
        return f"{self.role}[{', '.join(str(device) for device in self.devices)}]"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All teams of a node."""

    devices: tuple[Device, ...]
    trainers: tuple[Team, ...]
    prefixes: tuple[Team, ...]
    engines: tuple[Team, ...]

    @property
    def workers(self) -> tuple[Team, ...]:
        return (*self.trainers, *self.prefixes, *self.engines)

    @property
    def single(self) -> bool:
        """One process of each role."""
        return len(self.devices) == 1

    def devices_of(self, role: Role) -> tuple[Device, ...]:
        """Where there is a process of this role."""
        if role not in WORKERS:
            return (DEVICE,)
        return tuple(sorted(device for team in self.workers if team.role is role for device in team.devices))

    def several(self, role: Role) -> bool:
        """Whether a process of this role is told from others by its device."""
        return role in WORKERS and not self.single

    def name(self, role: Role, device: Device) -> str:
        """Of a process: its role, and its device where it is not the only one that there can be."""
        return f"{role}[{device}]" if self.several(role) else str(role)

    def team_of(self, role: Role, device: Device) -> Team:
        """The team that has this process; one that is in none is a team by itself."""
        for team in self.workers:
            if team.role is role and device in team.devices:
                return team
        return _alone(role, device)

    def teams_of(self, role: Role) -> tuple[Team, ...]:
        """All teams of a role."""
        if role not in WORKERS:
            return (_alone(role, DEVICE),)
        return tuple(team for team in self.workers if team.role is role)

    @property
    def training_devices(self) -> tuple[Device, ...]:
        return tuple(device for team in self.trainers for device in team.devices)

    @property
    def rollout_devices(self) -> tuple[Device, ...]:
        return tuple(device for team in self.engines for device in team.devices)

    def plan_group(self, device: Device) -> tuple[Device, ...]:
        """The devices of the trainer's layout plan that `device` trains in, by their place in it."""
        team, rank = next((t, t.devices.index(device)) for t in self.trainers if device in t.devices)
        mine = team.parallels[rank]
        size = max(mine.training, mine.rollout)
        at = self.devices.index(device) - mine.device
        return self.devices[at : at + size]


def _alone(role: Role, device: Device) -> Team:
    return Team(role=role, index=0, devices=(device,), parallels=(Parallel(),))


SINGLE = Fleet(
    devices=(DEVICE,),
    trainers=(_alone(Role.TRAINER, DEVICE),),
    prefixes=(_alone(Role.PREFIX, DEVICE),),
    engines=(_alone(Role.ROLLOUT, DEVICE),),
)
"""One device."""


def fleet_of(config: Config) -> Fleet:
    """The teams of a configuration, whose degrees `rollplex.layout.parallel.refusals.check` has let pass."""
    parallel = config.parallel
    devices = tuple(Device(node=DEVICE.node, index=DEVICE.index + n) for n in range(parallel.devices))
    if parallel.placement == "colocated":
        places = _places(devices, parallel.training, parallel.rollout)
        trained = sampled = places
    else:
        border = parallel.devices - parallel.rollout_devices
        trained = _places(devices[:border], parallel.training, parallel.training)
        sampled = _places(devices[border:], parallel.rollout, parallel.rollout)
    return Fleet(
        devices=devices,
        trainers=_teams(Role.TRAINER, trained),
        prefixes=_teams(Role.PREFIX, trained),
        engines=_teams(Role.ROLLOUT, sampled),
    )


@dataclass(frozen=True, kw_only=True)
class _Place:
    device: Device
    number: int
    """Of the layout group."""
    ranks: Ranks
    training: int
    rollout: int


def _places(devices: Sequence[Device], training: int, rollout: int) -> list[_Place]:
    members = group(TrainingLayout(degree=training), RolloutLayout(degree=rollout))
    return [
        _Place(
            device=device,
            number=at // len(members),
            ranks=members[at % len(members)],
            training=training,
            rollout=rollout,
        )
        for at, device in enumerate(devices)
    ]


def _teams(role: Role, places: Sequence[_Place]) -> tuple[Team, ...]:
    """By replica or engine, members by rank."""
    found: dict[int, dict[int, _Place]] = {}
    for place in places:
        size = max(place.training, place.rollout)
        sampling = role is Role.ROLLOUT
        rank = place.ranks.rollout if sampling else place.ranks.training
        inner = place.ranks.engine if sampling else place.ranks.replica
        index = place.number * (size // (place.rollout if sampling else place.training)) + inner
        found.setdefault(index, {})[rank] = place
    return tuple(
        Team(
            role=role,
            index=index,
            devices=tuple(members[rank].device for rank in sorted(members)),
            parallels=tuple(
                Parallel(
                    training=members[rank].training,
                    rollout=members[rank].rollout,
                    device=members[rank].ranks.device,
                    rank=rank,
                    replica=index,
                    replicas=len(found),
                )
                for rank in sorted(members)
            ),
        )
        for index, members in sorted(found.items())
    )
