"""A version on several devices has one digest: it tells them apart, and does not depend on who answered first."""

from __future__ import annotations

from typing import Any

import pytest

from rollplex.config import from_mapping
from rollplex.errors import StateError
from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.digests import check_replicas, combined
from rollplex_coordinator.decisions.fleet import Fleet, fleet_of

A, B = Device(), Device(index=1)


def test_of_one_device_it_is_the_devices_own() -> None:
    assert combined({A: "d" * 64}) == "d" * 64


def test_the_order_of_the_answers_does_not_matter_but_whose_they_are_does() -> None:
    digest = combined({A: "a" * 64, B: "b" * 64})
    assert digest == combined({B: "b" * 64, A: "a" * 64})
    assert digest != combined({A: "b" * 64, B: "a" * 64})
    assert digest not in {"a" * 64, "b" * 64}
    assert len(digest) == 64


def fleet(**parallel: Any) -> Fleet:
    sections = {
        "model": {"path": "model"},
        "data": {"path": "rows.jsonl"},
        "rewards": {"functions": [{"function": "score.py:score"}]},
    }
    return fleet_of(from_mapping({**sections, "parallel": parallel}))


@pytest.mark.parametrize(
    ("parallel", "alike"),
    [
        ({"devices": 4, "training": 2, "rollout": 2}, [(0, 2), (1, 3)]),
        ({"devices": 2}, [(0, 1)]),
        ({"devices": 4, "rollout": 2, "placement": "disaggregated", "rollout_devices": 2}, [(0, 1)]),
    ],
)
def test_devices_of_the_same_place_in_two_replicas_must_have_the_same(
    parallel: dict[str, Any], alike: list[tuple[int, int]]
) -> None:
    made = fleet(**parallel)
    first = {device: f"{device.index:064d}" for device in made.training_devices}
    same = {Device(index=other): first[Device(index=one)] for one, other in alike}
    check_replicas(made, {**first, **same})
    for one, other in alike:
        with pytest.raises(StateError, match=f"on device 0:{other}; needed {first[Device(index=one)]}.*device 0:{one}"):
            check_replicas(made, {**first, **same, Device(index=other): "e" * 64})


def test_ranks_of_one_replica_have_different_weights_and_may() -> None:
    check_replicas(fleet(devices=2, training=2), {A: "a" * 64, B: "b" * 64})
    check_replicas(fleet(devices=1), {A: "a" * 64})
