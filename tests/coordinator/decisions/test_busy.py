"""Spans of work may overlap and come in any order; a device is idle when no team that it is in works."""

from __future__ import annotations

import random

import pytest

from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.busy import Span, idle_s, union_s

A, B = Device(), Device(index=1)


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(1.0, 3.0), (2.0, 5.0)], 4.0),
        ([(1.0, 9.0), (2.0, 3.0), (4.0, 5.0)], 8.0),
        ([(1.0, 2.0), (5.0, 6.0)], 2.0),
        ([(1.0, 2.0), (2.0, 3.0)], 2.0),
    ],
)
def test_time_that_several_spans_cover_counts_once(spans: list[tuple[float, float]], seconds: float) -> None:
    for seed in range(5):
        random.Random(seed).shuffle(spans)
        assert union_s(spans) == seconds


def test_a_unit_of_a_team_is_work_of_each_of_its_devices() -> None:
    spans = [
        Span(devices=(A, B), start_s=10.0, end_s=12.0),
        Span(devices=(B,), start_s=11.0, end_s=15.0),
    ]
    assert idle_s((A, B), spans, 8.0) == {A: 6.0, B: 3.0}


def test_a_device_that_did_more_than_the_iteration_lasted_was_not_idle() -> None:
    assert idle_s((A,), [Span(devices=(A,), start_s=0.0, end_s=9.0)], 8.0) == {A: 0.0}
