"""JSONL files of a run: whole lines only, and errors with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.demo.records import number, read_rows
from rollplex.errors import DataError


@pytest.mark.parametrize(("text", "part"), [("nonsense\n", "not JSON"), ("[1]\n", "not a JSON object")])
def test_a_damaged_line_is_an_error_with_its_place(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text("{}\n" + text)
    with pytest.raises(DataError, match=part) as caught:
        list(read_rows(file))
    assert caught.value.where == f"{file}:2"


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step"')
    assert list(read_rows(file)) == [{"step": 0}]


def test_a_file_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    assert list(read_rows(tmp_path / "metrics.jsonl")) == []


def test_lines_without_the_wanted_text_are_not_even_parsed(tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    file.write_text('{"source": "train"\n{"source": "held_out"}\n')
    assert list(read_rows(file, having='"held_out"')) == [{"source": "held_out"}]


@pytest.mark.parametrize("row", [{}, {"a": None}, {"a": "1"}, {"a": True}])
def test_what_is_no_number_is_an_error_that_names_it(row: dict[str, object]) -> None:
    with pytest.raises(DataError, match="needed a"):
        number(row, "a", where="eval.jsonl")


def test_a_whole_number_is_a_number() -> None:
    assert number({"a": 3}, "a", where="") == 3.0
