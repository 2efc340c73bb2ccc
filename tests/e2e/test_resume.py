"""A run that was stopped or killed and goes on: every number as if it had not been."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rollplex.checkpoint.state import read
from rollplex.demo.digits import HELD_OUT
from rollplex.journal.events import CheckpointSaved, RunStarted
from support.nodes import Finished, Project, Start, run_processes

ITERATIONS = 6


@pytest.fixture(scope="module")
def settings(project: Project) -> dict[str, object]:
    data = str(project.folder / "data" / HELD_OUT)
    return {
        "checkpoint.every": 2,
        "run.iterations": ITERATIONS,
        "optimizer.schedule": "linear",
        "run.sample_every": 2,
        "eval": [
            {"name": "often", "data": data, "every": 3, "limit": 6},
            {"name": "at_the_end", "data": data, "limit": 6},
        ],
    }


@pytest.fixture(scope="module")
def straight(start: Start, settings: dict[str, object]) -> Finished:
    return start(overrides=settings).wait()


def _without_times(file: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def _assert_same(resumed: Finished, straight: Finished) -> None:
    assert (straight.code, resumed.code) == (0, 0), resumed.stderr
    assert [row["step"] for row in resumed.metrics] == list(range(ITERATIONS))
    for name in ("metrics.jsonl", "eval.jsonl", "completions.jsonl"):
        assert _without_times(resumed.run_dir / name) == _without_times(straight.run_dir / name), name
    for step in (0, 2, 4):
        name = f"samples/step_{step}.json"
        assert (resumed.run_dir / name).read_bytes() == (straight.run_dir / name).read_bytes(), name
    assert resumed.checkpoint() == straight.checkpoint()
    assert resumed.of(RunStarted)[0].resumed


@pytest.mark.timeout(300)
def test_three_iterations_a_stop_and_three_more_are_six(
    start: Start, settings: dict[str, object], straight: Finished
) -> None:
    first = start("--iterations", "3", overrides=settings).wait()
    assert first.code == 0, first.stderr
    assert read(first.run_dir / "checkpoints/step_3").wanted == 3
    resumed = start("--resume", overrides=settings, run_dir=first.run_dir).wait()
    assert "goes on after 3 iterations, from " in resumed.stderr
    _assert_same(resumed, straight)
    assert [saved.step for saved in resumed.of(CheckpointSaved)] == [2, 3, 4, 6]
    again = start("--resume", overrides=settings, run_dir=first.run_dir).wait()
    assert again.code == 2
    assert "The run has that many iterations already; got 6 wanted in all, 6 done in step_6" in again.stderr
    other = start("--resume", overrides={**settings, "run.seed": 7}, run_dir=first.run_dir).wait()
    assert other.code == 2
    assert "run.seed: was 0, now 7" in other.stderr
    assert sorted(path.name for path in (first.run_dir / "attempts").iterdir()) == ["1"], "refusals move nothing"


@pytest.mark.timeout(300)
def test_after_sigkill_and_with_a_damaged_newest_checkpoint_the_run_goes_on_from_the_one_before_and_says_so(
    start: Start, settings: dict[str, object], straight: Finished
) -> None:
    killed = start(overrides=settings)
    killed.until_iterations(5)
    killed.until((killed.run_dir / "checkpoints/step_4/MANIFEST.json").exists, "checkpoint 4")
    for pid, _ in run_processes(killed.run_dir):
        os.kill(pid, signal.SIGKILL)
    killed.process.wait(timeout=20)
    weights = killed.run_dir / "checkpoints/step_4/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    resumed = start("--resume", overrides=settings, run_dir=killed.run_dir).wait()
    assert "warning: step_4 is not used: " in resumed.stderr
    assert "model.safetensors" in resumed.stderr
    assert "goes on after 2 iterations, from " in resumed.stderr
    _assert_same(resumed, straight)
