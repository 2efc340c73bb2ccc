"""Who works together on several devices."""

from __future__ import annotations

from typing import Any

import pytest

from rollplex.config import Config, from_mapping
from rollplex.protocol.common import Device, Parallel, Role
from rollplex_coordinator.decisions.fleet import DEVICE, SINGLE, Fleet, Team, fleet_of


def config(**parallel: Any) -> Config:
    return from_mapping(
        {
            "model": {"path": "model"},
            "data": {"path": "rows.jsonl"},
            "rewards": {"functions": [{"function": "score.py:score"}]},
            "parallel": parallel,
        }
    )


def fleet(**parallel: Any) -> Fleet:
    return fleet_of(config(**parallel))


def shown(teams: tuple[Team, ...]) -> list[list[int]]:
    """Indices of the devices of each team, by rank."""
    return [[device.index for device in team.devices] for team in teams]


def test_one_device_has_one_process_of_each_role_and_nobody_to_meet() -> None:
    one = fleet()
    assert one == SINGLE
    assert one.single
    assert [(team.role, team.devices, team.parallels) for team in one.workers] == [
        (role, (DEVICE,), (Parallel(),)) for role in (Role.TRAINER, Role.PREFIX, Role.ROLLOUT)
    ]
    assert one.name(Role.TRAINER, DEVICE) == "trainer"
    assert one.trainers[0].met(0, "/run/meet", 600.0).meet == ""


@pytest.mark.parametrize(
    ("parallel", "trainers", "engines"),
    [
        ({"devices": 4, "training": 4, "rollout": 2}, [[0, 1, 2, 3]], [[0, 2], [1, 3]]),
        ({"devices": 4, "training": 2, "rollout": 1}, [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
        ({"devices": 4, "training": 1, "rollout": 2}, [[0], [1], [2], [3]], [[0, 1], [2, 3]]),
        ({"devices": 4, "training": 2, "rollout": 2}, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        (
            {"devices": 3, "training": 2, "rollout": 1, "placement": "disaggregated", "rollout_devices": 1},
            [[0, 1]],
            [[2]],
        ),
        (
            {"devices": 4, "training": 1, "rollout": 2, "placement": "disaggregated", "rollout_devices": 2},
            [[0], [1]],
            [[2, 3]],
        ),
    ],
)
def test_degrees_and_devices_make_teams(
    parallel: dict[str, Any], trainers: list[list[int]], engines: list[list[int]]
) -> None:
    found = fleet(**parallel)
    assert shown(found.trainers) == shown(found.prefixes) == trainers
    assert shown(found.engines) == engines
    for teams in (found.trainers, found.engines):
        assert [team.index for team in teams] == list(range(len(teams)))
        for team in teams:
            assert [p.rank for p in team.parallels] == list(range(len(team.devices)))
            assert {(p.replica, p.replicas) for p in team.parallels} == {(team.index, len(teams))}
    assert {device.index for device in found.training_devices} == {index for team in trainers for index in team}
    assert {device.index for device in found.rollout_devices} == {index for team in engines for index in team}


def test_the_devices_of_a_layout_plan_are_in_its_order() -> None:
    wide = fleet(devices=4, training=1, rollout=2)
    groups = [[device.index for device in wide.plan_group(Device(index=n))] for n in range(4)]
    assert groups == [[0, 1], [0, 1], [2, 3], [2, 3]]
    places = [wide.team_of(Role.TRAINER, Device(index=n)).parallels[0].device for n in range(4)]
    assert places == [0, 1, 0, 1]
    apart = fleet(devices=4, training=2, rollout=1, placement="disaggregated", rollout_devices=2)
    assert [device.index for device in apart.plan_group(Device(index=1))] == [0, 1]


def test_devices_that_only_sample_have_a_layout_of_their_own() -> None:
    apart = fleet(devices=4, training=2, rollout=1, placement="disaggregated", rollout_devices=2)
    assert {(p.training, p.rollout) for team in apart.trainers for p in team.parallels} == {(2, 2)}
    assert {(p.training, p.rollout) for team in apart.engines for p in team.parallels} == {(1, 1)}


def test_a_process_finds_its_team_and_its_name() -> None:
    four = fleet(devices=4, training=2, rollout=1)
    second = Device(index=3)
    assert four.team_of(Role.PREFIX, second) == four.prefixes[1]
    assert (str(four.prefixes[1]), four.prefixes[1].leader) == ("prefix[0:2, 0:3]", Device(index=2))
    assert four.name(Role.PREFIX, second) == "prefix[0:3]"
    assert four.name(Role.INPUT, DEVICE) == "input"
    assert [d.index for d in four.devices_of(Role.TRAINER)] == [0, 1, 2, 3]
    assert four.devices_of(Role.REWARD) == (DEVICE,)
    assert four.teams_of(Role.ROLLOUT) == four.engines
    (child,) = four.teams_of(Role.INPUT)
    assert child == four.team_of(Role.INPUT, DEVICE)


def test_one_of_a_team_can_be_told_alone() -> None:
    (team,) = fleet(devices=2, training=2, rollout=1).trainers
    second = team.only(1)
    assert (second.devices, second.parallels) == (team.devices[1:], team.parallels[1:])


def test_all_processes_of_a_role_meet_by_one_file_and_one_that_is_alone_by_none() -> None:
    four = fleet(devices=4, training=2, rollout=1)
    told = [team.met(rank, "/run/meet", 9.0) for team in four.trainers for rank in range(2)]
    assert {(p.meet, p.collective_s) for p in told} == {("/run/meet", 9.0)}
    apart = fleet(devices=2, placement="disaggregated", rollout_devices=1)
    assert apart.trainers[0].met(0, "/run/meet", 9.0).meet == ""
    assert not apart.single
