"""Predicted peaks, and that they are the ledger's own bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.errors import BudgetError
from rollplex.journal.phases import WORKING_PHASES, Phase
from rollplex.protocol.common import Device, Kind
from rollplex_coordinator.decisions.ledger import Granted, LeaseRequest, Ledger, Reservation
from rollplex_coordinator.decisions.peaks import PlannedBlock, check_fits, peaks_table, plan_peak

DEVICE = Device()
ALWAYS = frozenset(WORKING_PHASES)
WINDOW = frozenset({Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN})


def planned(
    kind: Kind, size_bytes: int, phases: frozenset[Phase], unit: str = "", device: Device = DEVICE
) -> PlannedBlock:
    return PlannedBlock(
        device=device,
        kind=kind,
        owner="trainer",
        purpose=f"{kind} here",
        size_bytes=size_bytes,
        phases=phases,
        unit=unit,
    )


EXAMPLE = (
    planned(Kind.ACTOR_WEIGHTS, 1_000, ALWAYS),
    planned(Kind.ROLLOUT_KV, 500, frozenset({Phase.ROLLOUT})),
    planned(Kind.WORKSPACE, 600, frozenset({Phase.TRAIN})),
    planned(Kind.ACTOR_PREFIX_KV, 30, WINDOW, "actor 0"),
    planned(Kind.PREFIX_ACTIVATIONS, 40, WINDOW, "actor 0"),
    planned(Kind.ACTOR_PREFIX_KV, 60, WINDOW, "actor 1"),
)


def test_the_minimum_has_the_largest_unit_and_the_ample_peak_has_all() -> None:
    (peaks,) = plan_peak(EXAMPLE)
    by_phase = {peak.phase: peak for peak in peaks.phases}
    assert by_phase[Phase.ROLLOUT].minimum_bytes == 1_000 + 500 + 70
    assert by_phase[Phase.ROLLOUT].largest_unit == "actor 0"
    assert by_phase[Phase.ROLLOUT].ample_bytes == 1_000 + 500 + 130
    assert by_phase[Phase.TRAIN].minimum_bytes == 1_000 + 600 + 70
    assert by_phase[Phase.IDLE].minimum_bytes == by_phase[Phase.IDLE].ample_bytes == 1_000
    assert (peaks.minimum_bytes, peaks.ample_bytes) == (1_670, 1_730)


def test_a_configuration_that_does_not_fit_is_refused_with_the_table_that_shows_why() -> None:
    check_fits(EXAMPLE, {DEVICE: 1_670})
    with pytest.raises(BudgetError) as caught:
        check_fits(EXAMPLE, {DEVICE: 1_669})
    text = str(caught.value)
    assert "at least 1,670 bytes, in TRAIN" in text
    for part in (
        "actor_weights: actor_weights here",
        "largest of 2 units that can wait",
        "minimum",
        "budget",
        "short by",
    ):
        assert part in text
    assert text.splitlines()[-1].split() == ["short", "by", "1"]


def test_a_refusal_says_what_went_off_the_budget_and_which_budget_is_enough() -> None:
    mib = 2**20
    with pytest.raises(BudgetError) as caught:
        check_fits([planned(Kind.WORKSPACE, 5 * mib + 1, ALWAYS)], {DEVICE: 5 * mib}, 1280 * mib)
    assert caught.value.got == (
        "1285 MiB, less 1280 MiB of memory.overhead (the processes themselves): a budget of 5,242,880 bytes"
    )
    assert caught.value.do.startswith("Raise memory.budget to 1286MiB or more, or make smaller")
    check_fits([planned(Kind.WORKSPACE, 5 * mib + 1, ALWAYS)], {DEVICE: 6 * mib}, 1280 * mib)


def test_a_refusal_does_not_ask_for_a_budget_that_the_gpu_does_not_have() -> None:
    mib = 2**20
    blocks = [planned(Kind.WORKSPACE, 6 * mib, ALWAYS)]
    with pytest.raises(BudgetError) as caught:
        check_fits(blocks, {DEVICE: 4 * mib}, 2 * mib, free_bytes=7 * mib)
    assert caught.value.do.startswith("Use a GPU with more memory (this one has 7 MiB free), or make smaller")
    with pytest.raises(BudgetError) as caught:
        check_fits(blocks, {DEVICE: 4 * mib}, 2 * mib, free_bytes=8 * mib)
    assert caught.value.do.startswith("Raise memory.budget to 8MiB or more")


def test_a_device_without_a_budget_has_none() -> None:
    with pytest.raises(BudgetError, match="device 0:1"):
        check_fits((*EXAMPLE, planned(Kind.WORKSPACE, 1, ALWAYS, device=Device(index=1))), {DEVICE: 10_000})


def test_the_table_names_each_device_and_shows_sizes_only_in_phases_where_a_block_lives() -> None:
    text = peaks_table((*EXAMPLE, planned(Kind.INPUTS, 7, ALWAYS, device=Device(index=1))), {DEVICE: 2_000})
    assert "device 0:0" in text
    assert "device 0:1" in text
    (row,) = [line for line in text.splitlines() if "rollout_kv" in line]
    assert row.split()[-1] == "500"
    assert row.count("500") == 1


@given(
    weights=st.integers(0, 50),
    kv=st.integers(0, 50),
    workspace=st.integers(0, 50),
    units=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=2), min_size=1, max_size=5),
    budget=st.integers(0, 200),
)
@settings(max_examples=150, deadline=None)
def test_the_minimum_is_exactly_what_the_ledger_needs_and_the_ample_peak_what_lets_nothing_wait(
    weights: int, kv: int, workspace: int, units: list[list[int]], budget: int
) -> None:
    blocks = [
        planned(Kind.ACTOR_WEIGHTS, weights, ALWAYS),
        planned(Kind.ROLLOUT_KV, kv, frozenset({Phase.ROLLOUT})),
        planned(Kind.WORKSPACE, workspace, frozenset({Phase.TRAIN})),
    ]
    for index, sizes in enumerate(units):
        blocks += [planned(Kind.ACTOR_PREFIX_KV, size, WINDOW, f"unit {index}") for size in sizes]
    (peaks,) = plan_peak(blocks)
    ledger = Ledger({DEVICE: budget})
    try:
        ledger.request(_request(weights, Phase.IDLE, Phase.DRAIN))
        ledger.reserve(Reservation(name="kv", device=DEVICE, size_bytes=kv, phases=frozenset({Phase.ROLLOUT})))
        ledger.reserve(Reservation(name="ws", device=DEVICE, size_bytes=workspace, phases=frozenset({Phase.TRAIN})))
        ledger.enter(Phase.ROLLOUT)
        answers = [ledger.request(*(_request(size, Phase.ROLLOUT, Phase.TRAIN) for size in sizes)) for sizes in units]
    except BudgetError:
        assert budget < peaks.minimum_bytes
    else:
        assert budget >= peaks.minimum_bytes
        assert all(isinstance(answer, Granted) for answer in answers) == (budget >= peaks.ample_bytes)


def _request(size_bytes: int, first: Phase, last: Phase) -> LeaseRequest:
    return LeaseRequest(
        device=DEVICE,
        kind=Kind.ACTOR_PREFIX_KV,
        size_bytes=size_bytes,
        producer="prefix",
        last_consumer="prefix",
        first=first,
        last=last,
        purpose="a unit",
    )
