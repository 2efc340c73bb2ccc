"""How an end is told: exit code, who, where in the run, which log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollplex.errors import BudgetError, ConfigError, DataError, RollplexError, WaitError
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Device, ErrorReport, Role
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.processes.link import WorkerDied, WorkerFailed
from rollplex_coordinator.processes.supervisor import Supervisor
from rollplex_coordinator.records.record import Record
from rollplex_coordinator.telling import exit_code, told
from support.core import FakeJournal

PEER = Peer(role=Role.PREFIX, device=Device(), incarnation=1, pid=7)


class Told:
    """An error in step 4, in TRAIN, with groups 2 and 5 not trained yet."""

    def __init__(self, run_dir: Path, error: RollplexError, **where: Any) -> None:
        record = Record(run_dir, FakeJournal([]))  # type: ignore[arg-type] # has what Record uses of a journal
        record.phase = where.get("phase", Phase.TRAIN)
        record.step = where.get("step", 4)
        record.open_groups = where.get("groups", (2, 5))
        supervisor = Supervisor(run_dir, 1, {})
        supervisor._incarnations = dict.fromkeys(where.get("started", Role), 1)
        self.event, self.text = told(
            error, record, supervisor, where.get("mps"), logs_stay=where.get("logs_stay", True)
        )
        record.close()


def failed(kind: str = "DataError") -> WorkerFailed:
    return WorkerFailed(PEER, ErrorReport(kind=kind, what="no image", got="none", where="row 3", traceback="frames"))


def test_a_worker_s_error_names_worker_kind_phase_step_group_and_log(tmp_path: Path) -> None:
    one = Told(tmp_path, failed())
    log_path = str(tmp_path / "logs" / "prefix.log")
    assert one.text == (
        "error: prefix[0:0] reported DataError in phase TRAIN, step 4, group 2-5 not trained yet: "
        f"row 3: no image; got none\n  log: {log_path}"
    )
    event = one.event
    assert (event.phase, event.step, event.service, event.group, event.log_path) == (
        "TRAIN",
        4,
        "prefix[0:0]",
        2,
        log_path,
    )
    assert (event.error.kind, event.error.traceback) == ("DataError", "frames")


def test_a_death_names_role_and_log(tmp_path: Path) -> None:
    error = WorkerDied(
        "the prefix service died",
        role=Role.PREFIX,
        got="killed by SIGKILL",
        needed="x",
        do="Look.",
        where="prefix[0:0]",
    )
    one = Told(tmp_path, error)
    assert one.text.startswith("error: WorkerDied in phase TRAIN, step 4, group 2-5 not trained yet: ")
    assert "prefix[0:0]: the prefix service died; got killed by SIGKILL" in one.text
    assert one.text.endswith("logs/prefix.log")
    assert one.event.service == "prefix[0:0]"


def test_a_log_that_is_removed_with_its_run_is_not_named(tmp_path: Path) -> None:
    one = Told(tmp_path, failed(), logs_stay=False)
    assert "log" not in one.text.splitlines()[-1]
    assert one.event.log_path == ""


def test_an_error_of_the_coordinator_s_own_outside_a_step_names_neither_step_nor_log(tmp_path: Path) -> None:
    error = WaitError("nobody came", where="trainer[0:0]")
    one = Told(tmp_path, error, step=None, groups=(), phase=Phase.LOAD)
    assert one.text == "error: WaitError in phase LOAD: trainer[0:0]: nobody came"
    assert (one.event.step, one.event.group, one.event.log_path, one.event.service) == (None, None, "", "trainer[0:0]")


def test_a_worker_that_somebody_else_started_has_no_log_here(tmp_path: Path) -> None:
    one = Told(tmp_path, failed(), started=())
    assert "log:" not in one.text
    assert one.event.log_path == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (BudgetError("x"), 2),
        (failed("ConfigError"), 2),
        (failed("BudgetError"), 2),
        (failed("DataError"), 1),
        (DataError("x"), 1),
        (WaitError("x"), 1),
    ],
)
def test_only_what_another_configuration_would_mend_ends_with_2(error: RollplexError, code: int) -> None:
    assert exit_code(error) == code


class Daemon:
    """What is asked of the GPUs of a run, and of the MPS daemon of the first of them."""

    def __init__(self, *, alive: bool = True) -> None:
        self.alive = alive

    def daemon(self, device: Device) -> Daemon | None:
        return self if device == Device() else None


FAULT = "CUDA error: an illegal memory access was encountered"


def test_a_gpu_fault_under_mps_is_told_once_for_all_workers(tmp_path: Path) -> None:
    error = WorkerFailed(PEER, ErrorReport(kind="RuntimeError", what=FAULT, do="Look."))
    one = Told(tmp_path, error, mps=Daemon())
    assert "prefix[0:0] reported RuntimeError" in one.text
    assert "GPU fault under MPS ends all of the GPU's clients: prefix was the first to tell, and rollout" in one.text
    assert one.event.error.do.startswith("Look. A GPU fault under MPS")
    assert "MPS daemon has ended" in Told(tmp_path, error, mps=Daemon(alive=False)).text
    assert "GPU fault" not in Told(tmp_path, error).text, "without MPS only one worker is lost"
    other = WorkerFailed(replace(PEER, device=Device(index=1)), error.report)
    assert "GPU fault" not in Told(tmp_path, other, mps=Daemon()).text, "the daemon of its own GPU counts"


def test_a_death_without_a_word_is_one_of_the_gpu_if_the_end_of_its_log_says_so(tmp_path: Path) -> None:
    died = WorkerDied("died", role=Role.TRAINER, got="killed by SIGABRT", needed="", do="", where="trainer[0:0]")
    assert "GPU fault" not in Told(tmp_path, died, mps=Daemon()).text
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("x" * 10_000 + f"\nterminate called\n  what():  {FAULT}\n")
    assert "trainer was the first to tell, and prefix and rollout" in Told(tmp_path, died, mps=Daemon()).text


def test_the_fault_of_a_process_without_a_gpu_is_its_own(tmp_path: Path) -> None:
    peer = Peer(role=Role.REWARD, device=Device(), incarnation=1, pid=7)
    error = WorkerFailed(peer, ErrorReport(kind="RewardError", what=FAULT))
    assert "under MPS" not in Told(tmp_path, error, mps=Daemon()).text
