"""The gap between rollout and trainer from written responses: by row, by iteration, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollplex.bench.gap import read_gaps, tables
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
