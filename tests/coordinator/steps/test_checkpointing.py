"""Checkpoints: what the trainer is asked for, what is on disk when, what stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollplex.checkpoint.folder import Identity, save
from rollplex.checkpoint.state import RunState
from rollplex.errors import CheckpointError
from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex.protocol.common import ErrorReport, Failed
from rollplex.protocol.rollout import GenerateUnit
from rollplex.protocol.trainer import CheckpointSaved, SaveCheckpoint
from rollplex_coordinator.processes.link import WorkerFailed
from rollplex_coordinator.processes.stop import StopRun
from rollplex_coordinator.steps.checkpointing import Checkpoints
from rollplex_coordinator.steps.iteration import Iteration
from support.core import Core

MakeCore = Callable[..., Core]
ROWS = (4, 9, 14, 2)


def iterate(core: Core, step: int) -> None:
    core.record.step = step
    Iteration(core.context, step=step, rows=ROWS, ahead=None).run()
    core.record.step = None


def writing(core: Core) -> None:
    """The trainer really makes folders."""

    def answer(m: SaveCheckpoint) -> list[Any]:
        Path(m.folder).mkdir()
        return [CheckpointSaved(cause=m.cause, step=m.step, version=m.version, folder=m.folder, size_bytes=10)]

    core.workers.answers[SaveCheckpoint] = answer


@pytest.fixture
def core(make_core: MakeCore) -> Core:
    core = make_core(checkpoint={"keep": 2}, run={"seed": 12})
    writing(core)
    return core


def folders(core: Core) -> list[str]:
    return sorted(path.name for path in (core.context.run_dir / "checkpoints").iterdir())


def test_the_trainer_is_asked_to_save_the_present_version_with_what_is_needed_to_go_on(core: Core) -> None:
    iterate(core, 0)
    core.context.fingerprints = {"model": "m"}
    Checkpoints(core.context, wanted=lambda: 9).save()
    (m,) = core.sent(SaveCheckpoint)
    assert (m.step, m.version, m.folder) == (1, 1, str(core.context.run_dir / "checkpoints" / "step_1"))
    state = msgspec.json.decode(m.state_json, type=RunState)
    assert (state.step, state.version, state.seed, state.wanted, state.failed_votes) == (1, 1, 12, 9, 0)
    assert state.fingerprints == {"model": "m"}
    assert state.table_hash == core.sizes.table.hash
    assert "seed: 12" in state.config
    assert core.ledger.phase is core.record.phase is Phase.IDLE


def test_it_is_journalled_durably_once_the_trainer_says_that_it_is_there(core: Core) -> None:
    Checkpoints(core.context).save()
    assert [entry[0] for entry in core.story] == ["send", "durable"]
    (saved,) = core.events(events.CheckpointSaved)
    assert (saved.step, saved.version, saved.size_bytes) == (0, 0, 10)
    assert saved.folder.endswith("step_0")


def test_the_same_step_and_version_are_saved_once(core: Core) -> None:
    checkpoints = Checkpoints(core.context)
    checkpoints.save()
    checkpoints.save()
    assert len(core.sent(SaveCheckpoint)) == 1
    iterate(core, 0)
    checkpoints.save()
    assert [m.step for m in core.sent(SaveCheckpoint)] == [0, 1]


def test_only_the_newest_stay_and_only_what_this_run_made_is_removed(core: Core) -> None:
    foreign = core.context.run_dir / "checkpoints" / "step_99"
    foreign.mkdir(parents=True)
    checkpoints = Checkpoints(core.context)
    for step in range(4):
        iterate(core, step)
        checkpoints.save()
    assert folders(core) == ["latest", "step_3", "step_4", "step_99"]
    assert checkpoints.newest == (4, 4)


def test_latest_leads_to_the_newest_that_is_journalled(core: Core) -> None:
    checkpoints = Checkpoints(core.context)
    latest = core.context.run_dir / "checkpoints" / "latest"
    seen = []
    answer = core.workers.answers[SaveCheckpoint]

    def look(m: SaveCheckpoint) -> list[Any]:
        found = answer(m)
        seen.append(latest.is_symlink() and str(latest.readlink()))
        return found

    core.workers.answers[SaveCheckpoint] = look
    for step in range(3):
        iterate(core, step)
        checkpoints.save()
    assert seen == [False, "step_1", "step_2"]
    assert str(latest.readlink()) == "step_3"
    assert latest.is_dir()


def test_something_else_of_that_name_does_not_end_the_run(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    (core.context.run_dir / "checkpoints").mkdir()
    (core.context.run_dir / "checkpoints" / "latest").write_text("mine")
    Checkpoints(core.context).save()
    assert "is no link and is left alone" in caplog.text


def test_an_old_one_that_cannot_be_removed_does_not_end_the_run(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(core.context)
    for step in range(3):
        iterate(core, step)
        checkpoints.save()
        if step == 0:
            shutil.rmtree(core.context.run_dir / "checkpoints" / "step_1")
    assert "could not be removed" in caplog.text
    assert folders(core) == ["latest", "step_2", "step_3"]


def test_a_stop_meanwhile_waits_until_it_is_saved(core: Core) -> None:
    answer = core.workers.answers[SaveCheckpoint]

    def stop(m: SaveCheckpoint) -> list[Any]:
        core.link.stop(StopRun(source="SIGINT", exit_code=130))
        return answer(m)

    core.workers.answers[SaveCheckpoint] = stop
    Checkpoints(core.context).save()
    assert core.events(events.CheckpointSaved)
    with pytest.raises(StopRun):
        iterate(core, 0)
    assert not core.sent(GenerateUnit), "nor longer"


def test_a_trainer_that_cannot_save_ends_the_run_and_nothing_is_journalled(core: Core) -> None:
    report = ErrorReport(kind="CheckpointError", what="the disk is full")
    core.workers.answers[SaveCheckpoint] = lambda m: [Failed(cause=m.cause, error=report)]
    with pytest.raises(WorkerFailed, match="the disk is full"):
        Checkpoints(core.context).save()
    assert not core.events(events.CheckpointSaved)


def test_a_folder_that_cannot_be_made_is_an_error_that_says_where(core: Core) -> None:
    iterate(core, 0)
    (core.context.run_dir / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=f"{core.context.run_dir}/checkpoints: The folder .* got File exists"):
        Checkpoints(core.context, wanted=lambda: 1).save()
    assert not core.sent(SaveCheckpoint)


def test_checkpoints_of_an_earlier_attempt_are_journalled_and_pruned_like_its_own(core: Core) -> None:
    parent = core.context.run_dir / "checkpoints"

    def fill(folder: Path) -> None:
        (folder / "w").write_bytes(b"1234")

    earlier = []
    for step in (1, 2, 3):
        earlier.append(parent / f"step_{step}")
        identity = Identity(step=step, version=step, digest="x", table_hash="t")
        save(earlier[-1], identity, needed_bytes=1, write=fill, libraries={})
    (parent / "step_2/MANIFEST.json").unlink()
    checkpoints = Checkpoints(core.context)
    checkpoints.adopt(earlier, 3, 3)
    assert checkpoints.folder == str(parent / "step_3")
    assert [(e.step, e.size_bytes) for e in core.events(events.CheckpointSaved)] == [(1, 4), (3, 4)]
    checkpoints.save()
    assert folders(core) == ["LATEST", "latest", "step_0", "step_2", "step_3"]
