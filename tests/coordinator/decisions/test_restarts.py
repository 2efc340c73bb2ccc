"""Whether all workers start again: which ends are worth it, how many there are, how long is waited."""

from __future__ import annotations

import pytest

from rollplex.protocol.common import Role
from rollplex_coordinator.decisions.restarts import LONGEST_PAUSE_S, End, Restarts

DEAD = End(role=Role.PREFIX, kind="ServiceDied", text="killed by SIGKILL")


def failed(kind: str, text: str = "") -> End:
    return End(role=Role.TRAINER, kind=kind, text=text)


@pytest.mark.parametrize(
    "end",
    [
        DEAD,
        failed("WaitError", "no progress"),
        failed("RuntimeError", "CUDA error: an illegal memory access was encountered"),
        failed("SegmentError", "cuMemMap: CUDA_ERROR_MPS_CLIENT_TERMINATED"),
        failed("EngineError", "SGLang has ended"),
        End(role=None, kind="MpsError", text="the MPS daemon ended"),
    ],
    ids=lambda end: end.kind,
)
def test_what_another_start_may_mend_is_worth_one(end: End) -> None:
    assert Restarts(1).not_worth(end, whole=True) == ""


@pytest.mark.parametrize(
    "kind",
    [
        "BudgetError",
        "CheckpointError",
        "ConfigError",
        "DivergedError",
        "ProtocolError",
        "StaleWeightsError",
        "StateError",
    ],
)
def test_what_a_new_process_would_say_again_is_not(kind: str) -> None:
    assert kind in Restarts(1).not_worth(failed(kind), whole=True)


def test_a_lack_of_memory_of_the_gpu_is_no_fault_of_it() -> None:
    assert Restarts(1).not_worth(failed("BudgetError", "CUDA error: out of memory"), whole=True)


@pytest.mark.parametrize("role", [Role.INPUT, Role.REWARD])
def test_only_workers_start_again(role: Role) -> None:
    assert Restarts(1).not_worth(End(role=role, kind="ServiceDied", text=""), whole=True) == f"{role} is no worker"


def test_weights_that_are_half_stepped_are_not_gone_on_with() -> None:
    assert "not committed" in Restarts(1).not_worth(DEAD, whole=False)


def test_none_is_as_if_there_were_no_restarts() -> None:
    restarts = Restarts(0)
    assert restarts.not_worth(DEAD, whole=True) == "run.restarts is 0"
    assert not restarts.left


def test_there_are_so_many_in_a_run_whatever_is_done_between_them() -> None:
    restarts = Restarts(2)
    for left in (True, False):
        restarts.begin()
        restarts.progressed()
        assert restarts.left is left
    assert restarts.made == 2


def test_the_first_is_at_once_and_later_ones_wait_twice_as_long_each_until_the_work_gets_on() -> None:
    restarts = Restarts(99)
    assert [restarts.begin() for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    restarts.progressed()
    assert [restarts.begin(), restarts.begin()] == [0, 1]
