"""Learning-rate schedules."""

from __future__ import annotations

import math

import msgspec
import pytest

from rollplex.errors import ConfigError
from rollplex_trainer.schedule import learning_rate
from support.optimizers import ADAMW

SETTINGS = msgspec.structs.replace(ADAMW, lr=0.8, warmup_steps=4, total_steps=24, final_lr_ratio=0.05)


def rates(schedule: str, updates: list[int], **changes: int) -> list[float]:
    settings = msgspec.structs.replace(SETTINGS, schedule=schedule, **changes)
    return [learning_rate(settings, update) for update in updates]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_starts_above_0_and_ends_at_the_full_rate(schedule: str) -> None:
    assert rates(schedule, [0, 1, 2, 3, 4]) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8], rel=1e-15)


def test_constant_stays() -> None:
    assert rates("constant", [5, 23, 1000]) == [0.8, 0.8, 0.8]


def test_linear_falls_in_equal_steps_to_the_final_rate_and_stays() -> None:
    got = rates("linear", [4, 9, 14, 24, 1000])
    assert got == pytest.approx([0.8, 0.8 * (1 - 0.95 / 4), 0.8 * (1 - 0.95 / 2), 0.04, 0.04], rel=1e-14)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_last_update_is_still_above_the_final_rate_so_none_has_a_rate_of_0(schedule: str) -> None:
    assert rates(schedule, [24], final_lr_ratio=0) == [0.0]
    assert all(rate > 0 for rate in rates(schedule, list(range(24)), final_lr_ratio=0))


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_final_rate() -> None:
    got = rates("cosine", [4, 9, 14, 24, 1000])
    quarter = 0.05 + 0.95 * (1 + math.cos(math.pi / 4)) / 2
    assert got == pytest.approx([0.8, 0.8 * quarter, 0.8 * 0.525, 0.04, 0.04], rel=1e-14)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_without_warm_up_the_first_update_has_the_full_rate(schedule: str) -> None:
    assert rates(schedule, [0], warmup_steps=0) == [0.8]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_of_nothing_but_warm_up_does_not_divide_by_0(schedule: str) -> None:
    assert rates(schedule, [3, 4, 5], total_steps=4) == pytest.approx([0.8, 0.8, 0.04], rel=1e-15)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="polynomial"):
        rates("polynomial", [5])
