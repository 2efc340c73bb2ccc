"""What the driver says of HBM against the books."""

from __future__ import annotations

import pytest

from rollplex.nvml import GpuProcess
from rollplex_coordinator.decisions.observed import Account, Leased, Reading, complaint, measured_overhead, overdrawn

GIB = 2**30
LEASED = Leased(segments_bytes=20 * GIB, private=(("prefix", 6 * GIB), ("trainer", 4 * GIB)))


def account(used: int) -> Account:
    return Account(reading=Reading(used_bytes=used, leased=LEASED), baseline_bytes=GIB, overhead_bytes=5 * GIB)


def test_what_is_used_is_baseline_leases_overhead_and_a_difference() -> None:
    assert account(36 * GIB).difference_bytes == 0
    assert account(38 * GIB).difference_bytes == 2 * GIB
    assert account(33 * GIB).difference_bytes == -3 * GIB
    assert account(36 * GIB).ours_bytes == 35 * GIB


def test_overhead_is_what_is_used_beside_leases_while_nothing_works() -> None:
    reading = Reading(used_bytes=36 * GIB, leased=LEASED)
    assert measured_overhead(reading, GIB) == 5 * GIB
    assert measured_overhead(reading, 30 * GIB) == 0


@pytest.mark.parametrize("used", [36 * GIB, 38 * GIB, 34 * GIB])
def test_a_difference_of_two_percent_of_the_device_is_nothing_to_tell(used: int) -> None:
    assert complaint(account(used), {}, 100 * GIB) == ""


def test_more_than_is_leased_is_told_part_by_part() -> None:
    text = complaint(account(39 * GIB), {"prefix": 7 * GIB}, 100 * GIB)
    assert text == (
        "the GPU holds 3.00 GiB more than its leases and overhead explain: 38.00 GiB used; segments 20.00 GiB, private "
        "prefix 6.00 GiB (held 7.00 GiB), trainer 4.00 GiB (held not measured), overhead 5.00 GiB, unexplained 3.00 GiB"
    )


def test_less_than_is_leased_is_told_too() -> None:
    text = complaint(account(30 * GIB), {}, 100 * GIB)
    assert "the GPU holds 6.00 GiB less than is leased: 29.00 GiB used" in text
    assert "unexplained -6.00 GiB" in text


def test_a_budget_that_was_kept_is_no_error() -> None:
    assert overdrawn(account(36 * GIB), 35 * GIB, (), {}) is None


def test_a_budget_that_was_exceeded_names_the_process_that_holds_most() -> None:
    processes = (GpuProcess(pid=1, used_bytes=2 * GIB), GpuProcess(pid=7, used_bytes=9 * GIB))
    error = overdrawn(account(36 * GIB), 34 * GIB, processes, {7: "prefix", 1: "trainer"})
    assert error is not None
    assert error.where == "prefix"
    assert error.got == "35.00 GiB used, 30.00 GiB leased; prefix 9.00 GiB, trainer 2.00 GiB"
    assert error.needed == "at most 34.00 GiB"
    strange = overdrawn(account(36 * GIB), 34 * GIB, processes, {1: "trainer"})
    assert strange is not None
    assert strange.where == "pid 7, not ours"
    unknown = overdrawn(account(36 * GIB), 34 * GIB, (GpuProcess(pid=7, used_bytes=None),), {})
    assert unknown is not None
    assert "nobody" in str(overdrawn(account(36 * GIB), 34 * GIB, (), {}))
