"""Runs on disk, as a coordinator leaves them, written in a moment: journal, numbers, samples."""

from __future__ import annotations

import base64
import json
import sqlite3
from pathlib import Path

from rollplex.journal.events import (
    ErrorRaised,
    GroupFinished,
    GroupRewarded,
    IterationDone,
    IterationStarted,
    PhaseEntered,
    RunEnded,
    RunStarted,
    UnitDone,
    UnitKind,
    UpdateBegin,
    UpdateCommitted,
)
from rollplex.protocol.common import ErrorReport
from rollplex.protocol.inputs import Thumbnail
from rollplex_coordinator.records.journal import Journal
from rollplex_coordinator.records.sample_files import SampleFiles
from rollplex_coordinator.records.sample_table import SampleGroup, SampleResponse, SampleTable

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII=")
STEP_S = 1.0
"""One iteration: rollout, score, train and update of a quarter each."""


def write_run(
    folder: Path, *, steps: int = 3, error: ErrorReport | None = None, sampled: tuple[int, ...] = (0, 2)
) -> Path:
    """A run of so many iterations that has ended; with an error, by it. Times of the journal begin at 100 s."""
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / "journal.sqlite") as journal:
        journal.append(
            RunStarted(
                run=folder.name,
                pid=1,
                host="h",
                boot_id="b",
                seed=0,
                schedule="overlap",
                share_prefix=True,
                config_digest="d",
                iterations_wanted=steps,
            )
        )
        for step in range(steps):
            _iteration(journal, step)
        if error is not None:
            journal.append(
                ErrorRaised(error=error, phase="TRAIN", step=steps, service="trainer[0:0]", log_path="t.log")
            )
        journal.append(
            RunEnded(
                run=folder.name,
                exit_code=0 if error is None else 1,
                reason="done" if error is None else str(error.what),
            )
        )
    _set_clock(folder / "journal.sqlite")
    lines = [json.dumps({"step": step, "reward": step / 10, "kl": float("nan"), "loss": -1.5}) for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for step in sampled:
        SampleFiles(folder).write(sample_table(step))
    return folder


def sample_table(step: int) -> SampleTable:
    """Two groups of rows 10 * step and 10 * step + 1, with a picture each; rewards 0, 0.5, 1, and one that is none."""
    groups = [
        SampleGroup(
            group=group,
            row=10 * step + group,
            prompt="which digit <b>is</b> this",
            media=(Thumbnail(name="image 1", png=PNG, width=1, height=1), Thumbnail(name="image 2", problem="lost")),
            responses=tuple(
                SampleResponse(
                    sample=sample,
                    completion=f"answer {sample}",
                    reward=reward,
                    rewards={"right": reward},
                    advantage=None if reward is None else reward - 0.5,
                    tokens=2,
                    stopped=True,
                )
                for sample, reward in enumerate((0.0, 0.5, 1.0, None))
            ),
        )
        for group in range(2)
    ]
    return SampleTable(step=step, version=step, functions=("right",), groups=tuple(groups), shown=True)


def _iteration(journal: Journal, step: int) -> None:
    at = 100.0 + step * STEP_S

    def unit(kind: UnitKind, service: str, start: float, end: float, decode: float | None = None) -> None:
        journal.append(
            UnitDone(
                step=step,
                kind=kind,
                unit=0,
                service=service,
                start_s=at + start,
                end_s=at + end,
                groups=(0, 1),
                decode_start_s=None if decode is None else at + decode,
            )
        )

    journal.append(IterationStarted(step=step, version=step, rows=(10 * step, 10 * step + 1)))
    journal.append(PhaseEntered(phase="ROLLOUT", start_s=at, step=step))
    unit(UnitKind.ACTOR_PREFIX, "prefix[0:0]", 0.05, 0.2)
    journal.append(GroupFinished(step=step, group=0, row=10 * step, lengths=(2, 2), end_s=at + 0.2))
    unit(UnitKind.GENERATE, "rollout[0:0]", 0.0, 0.25, 0.1)
    journal.append(PhaseEntered(phase="SCORE", start_s=at + 0.25, step=step))
    journal.append(
        GroupRewarded(step=step, group=0, row=10 * step, mean=0.5, std=0.1, start_s=at + 0.26, end_s=at + 0.3)
    )
    unit(UnitKind.SCORE, "prefix[0:0]", 0.3, 0.4)
    journal.append(PhaseEntered(phase="TRAIN", start_s=at + 0.5, step=step))
    unit(UnitKind.SUFFIX, "trainer[0:0]", 0.5, 0.7)
    journal.append(PhaseEntered(phase="UPDATE", start_s=at + 0.75, step=step))
    journal.append_durable(UpdateBegin(step=step, version=step))
    journal.append_durable(UpdateCommitted(step=step, version=step + 1, digest="d", start_s=at + 0.8, end_s=at + 0.9))
    journal.append(PhaseEntered(phase="IDLE", start_s=at + 1.0, step=step))
    journal.append(IterationDone(step=step, version=step + 1, metrics={"reward": step / 10}))


def _set_clock(path: Path) -> None:
    """Events happen when their units say so, not when the test wrote them."""
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE events SET monotonic_s = 100.0 + coalesce(step, 0)")
    connection.close()
