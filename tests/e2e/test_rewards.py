"""Reward functions that raise, hang, or return nonsense: named, by policy fatal or skipped, never silently 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.journal.events import GroupRewarded, GroupSkipped, LeaseGranted
from support.nodes import Finished, Project, Start

MOODS = {"raise": "raised", "hang": "timed_out", "nan": "not_finite", "few": "wrong_count", "text": "wrong_type"}
FUNCTIONS = str(Path(__file__).parents[1] / "support" / "bad_rewards.py")


def settings(project: Project, folder: Path, moods: list[str]) -> dict[str, object]:
    """The project's rows with a column `mood`: those given first, then fine ones."""
    lines = (project.folder / "data" / "train.jsonl").read_text().splitlines()[: len(moods) + 3]
    rows = [json.loads(line) for line in lines]
    for row, mood in zip(rows, [*moods, "fine", "fine", "fine"], strict=True):
        row["mood"] = mood
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data.path": str(data),
        "data.image_dir": str(project.folder / "data"),
        "data.shuffle": False,
        "data.prompts_per_iteration": len(rows),
        "rewards.functions": [{"function": f"{FUNCTIONS}:good"}, {"function": f"{FUNCTIONS}:moody"}],
        "rewards.time_limit_s": 1.0,
        "batching.decode_prompts": 0,
    }


@pytest.fixture(scope="module")
def skipping(start: Start, project: Project, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    overrides = settings(project, tmp_path_factory.mktemp("moods"), list(MOODS))
    return start("--iterations", "1", overrides={**overrides, "rewards.on_error": "skip_group"}).wait()


@pytest.mark.timeout(150)
def test_skipped_groups_are_named_and_left_out_and_the_others_trained(skipping: Finished) -> None:
    assert skipping.code == 0, skipping.stderr
    skipped = {s.row: s for s in skipping.of(GroupSkipped)}
    assert {row: s.problem for row, s in skipped.items()} == dict(enumerate(MOODS.values()))
    assert all(s.function.endswith("moody") for s in skipped.values())
    assert "not to my taste" in skipped[0].detail
    assert sorted(r.row for r in skipping.of(GroupRewarded)) == [5, 6, 7]
    (metrics,) = skipping.metrics
    assert metrics["skipped_groups"] == len(MOODS)
    assert metrics["reward"] == pytest.approx(1.0 + (0.0 + 0.25 + 0.5) / 3)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("mood", ["raise", "hang"])
def test_by_default_the_run_ends_with_function_and_row(
    start: Start, project: Project, tmp_path: Path, mood: str
) -> None:
    done = start("--iterations", "1", overrides=settings(project, tmp_path, [mood])).wait()
    assert done.code == 1
    _, _, text = done.stderr.partition("error:")
    for part in ("RewardError", "moody", "row 0", "group 0", "rewards.on_error: skip_group"):
        assert part in text, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.metrics


@pytest.mark.timeout(150)
def test_a_column_that_one_row_lacks_is_refused_before_a_model_is_loaded(
    start: Start, project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = settings(project, tmp_path, ["fine", "fine"])
    data = tmp_path / "rows.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    del rows[1]["mood"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = (
        f"{data}:2 (row 1): A reward function requires a column that rows lack; got argument 'mood' of "
        f"{FUNCTIONS}:moody; 1 of the 5 rows of 'train' lacks it, this one first"
    )

    done = start("--iterations", "1", overrides=overrides).wait()
    assert done.code == 1
    assert named in done.stderr
    assert done.of(LeaseGranted) == []

    changes = [f"--set={key}={json.dumps(value)}" for key, value in overrides.items()]
    assert run(["up", str(project.config), "--dry-run", *changes]) == 1
    assert named in capfd.readouterr().err
