"""The gap between rollout and trainer from written responses: by row, by iteration, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollplex.bench.gap import read_gaps, read_rounding, tables
from rollplex.cli.app import run
from rollplex.errors import DataError


def line(step: int, row: int, *gaps: float, **changes: Any) -> dict[str, Any]:
    """A response whose tokens differ by `gaps`, up and down in turn."""
    rollout = [-1.0 - index for index in range(len(gaps))]
    trainer = [value + gap * (-1) ** index for index, (value, gap) in enumerate(zip(rollout, gaps, strict=True))]
    values = {"source": "train", "step": step, "row": row, "sample": 0, "completion": "…", "reward": None}
    return values | {"logprobs": rollout, "trainer_logprobs": trainer} | changes


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    (folder / "completions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


def test_gaps_are_absolute_and_told_by_row_and_by_iteration(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        line(0, 7, 0.01, 0.03),
        line(0, 7, 0.02),
        line(0, 3, 0.0),
        line(1, 3, 0.04),
        line(0, 3, 9.0, source="held_out"),
    )
    gaps = read_gaps(folder)
    assert [(gap.number, gap.tokens) for gap in gaps.rows] == [(3, 2), (7, 3)]
    assert [gap.mean for gap in gaps.rows] == pytest.approx([0.02, 0.02])
    assert [gap.largest for gap in gaps.rows] == pytest.approx([0.04, 0.03])
    assert [gap.mean for gap in gaps.steps] == pytest.approx([0.015, 0.04])
    assert gaps.slope == pytest.approx(0.025)
    rows, steps = tables(gaps)
    assert [row[0] for row in rows.rows] == ["3", "7"]
    assert [row[2] for row in steps.rows] == ["0.01500", "0.04000"]


@pytest.mark.parametrize(("mean", "code"), [(0.019, 0), (0.021, 1)])
def test_the_command_fails_if_a_rows_mean_is_too_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mean: float, code: int
) -> None:
    assert run(["bench", "gap", str(write(tmp_path, line(0, 1, 0.001), line(0, 2, mean)))]) == code
    assert f"greatest mean of a row: {mean:.5f} (limit 0.02)" in capsys.readouterr().out


def test_a_run_that_wrote_down_no_tokens_is_told_how(tmp_path: Path) -> None:
    bare = {key: value for key, value in line(0, 1, 0.1).items() if "logprobs" not in key}
    with pytest.raises(DataError, match=r"no log-probabilities.*run\.log_tokens: true"):
        read_gaps(write(tmp_path, bare))
    with pytest.raises(DataError, match="cannot be read"):
        read_gaps(tmp_path / "none")


def test_a_replay_in_float32_tells_what_rounding_costs_each_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "bf16", tmp_path / "fp32"
    one.mkdir()
    other.mkdir()
    ids = {"ids": [5, 6]}
    write(
        one,
        line(0, 7, 0, 0, **ids, logprobs=[-1.0, -2.0], trainer_logprobs=[-1.03, -2.01]),
        line(0, 7, 0, 0, ids=[8, 9], sample=1),  # replayed with other tokens: not compared
        line(1, 7, 0, 0, **ids),  # not replayed
    )
    write(
        other,
        line(0, 7, 0, 0, **ids, trainer_logprobs=[-1.01, -2.01]),
        line(0, 7, 0, 0, ids=[8, 8], sample=1, trainer_logprobs=[-9.0, -9.0]),
    )
    found = read_rounding(one, other)
    assert found.tokens == 2
    assert (found.gap, found.rollout, found.trainer) == pytest.approx((0.02, 0.01, 0.01))
    assert run(["bench", "gap", str(one), "--exact", str(other)]) == 0
    assert "the rollout is 0.01000 away, the trainer 0.01000" in capsys.readouterr().out


def test_runs_without_a_response_in_common_are_refused_before_anything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (other := tmp_path / "fp32").mkdir()
    write(tmp_path, line(0, 7, 0.1, ids=[5]))
    write(other, line(0, 7, 0.1, ids=[6]))
    assert run(["bench", "gap", str(tmp_path), "--exact", str(other)]) != 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "no response in common" in said.err
    assert "rollout.engine=replay" in said.err
