from __future__ import annotations

import pytest

from rollplex.terminal.words import brief, duration, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (3 * 2**20, "3 MiB"), (2**40 + 2**38, "1.25 TiB")],
)
def test_sizes_have_three_digits_and_a_unit(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d 00 h"),
        (273_600, "3 d 04 h"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_short_times_are_brief() -> None:
    assert [brief(seconds) for seconds in (0.0524, 1.251, 123.4)] == ["0.052", "1.25", "123"]
