from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex.errors import JournalError
from rollplex_coordinator.archive.numbers import METRICS_FILE, read_columns


def write(folder: Path, rows: int) -> None:
    lines = [json.dumps({"step": step, "reward": step / 2, "kl": float("inf"), "name": "x"}) for step in range(rows)]
    (folder / METRICS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_columns_are_in_step_order_and_what_is_not_finite_is_none(tmp_path: Path) -> None:
    write(tmp_path, 3)
    found = read_columns(tmp_path, ["reward", "kl", "nothing"], points=10)
    assert found.steps == [0, 1, 2]
    assert found.values == {"reward": [0.0, 0.5, 1.0], "kl": [None] * 3, "nothing": [None] * 3}
    assert found.names == ["reward", "step"]


@pytest.mark.parametrize(
    ("rows", "points", "steps"), [(10, 4, [0, 3, 6, 9]), (11, 4, [0, 3, 6, 9, 10]), (4, 4, [0, 1, 2, 3])]
)
def test_many_rows_are_thinned_evenly_and_the_last_is_kept(
    tmp_path: Path, rows: int, points: int, steps: list[int]
) -> None:
    write(tmp_path, rows)
    found = read_columns(tmp_path, ["reward"], points=points)
    assert found.steps == steps
    assert found.rows == rows


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 2)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "rew')
    assert read_columns(tmp_path, ["reward"], points=10).steps == [0, 1]


def test_a_run_without_numbers_has_empty_columns(tmp_path: Path) -> None:
    found = read_columns(tmp_path, ["reward"], points=10)
    assert (found.steps, found.values, found.rows) == ([], {"reward": []}, 0)


@pytest.mark.parametrize("text", ["[1]\n", "{}\n", "not json\n", '{"step": "x"}\n'])
def test_a_file_that_no_run_wrote_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / METRICS_FILE).write_text(text)
    with pytest.raises(JournalError, match="metrics.jsonl"):
        read_columns(tmp_path, ["reward"], points=10)
