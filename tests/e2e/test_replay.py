"""Recorded responses replayed by a whole node: the same weights again, and a run that says what it is."""

from __future__ import annotations

import pytest

from rollplex.bench.gap import read_gaps
from rollplex.journal.events import GroupFinished, UpdateCommitted
from support.nodes import Finished, Project, Start

ITERATIONS = 2


@pytest.fixture(scope="module")
def recorded(start: Start, project: Project) -> Finished:
    recording = {"run.schedule": "serial", "run.log_tokens": True, "run.log_completions": 1000}
    run = start("--iterations", str(ITERATIONS), overrides=recording).wait()
    assert run.code == 0, run.stderr
    assert "REPLAYED" not in run.stderr
    return run


def test_a_replay_makes_the_same_updates_bit_for_bit_without_sampling(start: Start, recorded: Finished) -> None:
    replaying: dict[str, object] = {
        "run.schedule": "stream",
        "rollout.engine": "replay",
        "rollout.replay": str(recorded.run_dir / "completions.jsonl"),
        "rollout.replay_s": 0.3,
        "checkpoint.at_end": False,
    }
    replayed = start("--iterations", str(ITERATIONS), overrides=replaying).wait()
    assert replayed.code == 0, replayed.stderr
    assert "REPLAYED: responses come from" in replayed.stderr
    first, second = ([commit.digest for commit in run.of(UpdateCommitted)] for run in (recorded, replayed))
    assert first == second
    assert len(first) == ITERATIONS
    lengths = [{(g.step, g.group): g.lengths for g in run.of(GroupFinished)} for run in (recorded, replayed)]
    assert lengths[0] == lengths[1]
    assert [row.get("replayed") for row in replayed.metrics] == [1.0] * ITERATIONS
    assert not (replayed.run_dir / "checkpoints").exists()
    gaps = read_gaps(recorded.run_dir)
    assert [gap.number for gap in gaps.steps] == list(range(ITERATIONS))
    for gap, row in zip(gaps.steps, recorded.metrics, strict=True):
        assert gap.mean == pytest.approx(row["sampling/sampling_logp_difference/mean"], abs=1e-7)
        assert gap.largest == pytest.approx(row["sampling/sampling_logp_difference/max"], abs=1e-7)


def test_a_replay_of_fewer_steps_than_are_wanted_ends_by_naming_the_missing_one(
    start: Start, recorded: Finished
) -> None:
    replaying: dict[str, object] = {
        "rollout.engine": "replay",
        "rollout.replay": str(recorded.run_dir / "completions.jsonl"),
    }
    replayed = start("--iterations", str(ITERATIONS + 1), overrides=replaying).wait()
    assert replayed.code == 1
    assert "A group was not recorded whole" in replayed.stderr
    assert f"step {ITERATIONS}, group 0" in replayed.stderr
