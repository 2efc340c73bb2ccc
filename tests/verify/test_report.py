"""The report: its file and its words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollplex.errors import DataError
from rollplex.verify.report import Comparison, GradientDifference, LogprobDifference, Report, lines, read, write

LOGPROBS = LogprobDifference(largest=2e-6, tolerance=1e-4, sample=3, position=7, tokens=40, beyond=0)
GRADIENTS = GradientDifference(
    largest=3e-6, tolerance=1e-4, parameter="lm_head.weight", parameters=57, zero=0, beyond=0
)
REPORT = Report(
    passed=True,
    config="job.yaml",
    data="rows.jsonl",
    row=4,
    group_size=3,
    prompt_tokens=31,
    media=2,
    response_tokens=(5, 9, 26),
    dtype="float32",
    comparisons=(
        Comparison(name="split against unsplit", passed=True, logprobs=LOGPROBS, gradients=GRADIENTS),
        Comparison(name="rollout against trainer", passed=True, logprobs=LOGPROBS, gradients=None),
    ),
)


def test_a_report_is_read_as_it_was_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write(REPORT, file)
    assert read(file) == REPORT
    assert list(tmp_path.iterdir()) == [file]


def test_the_keys_that_others_read_are_there(tmp_path: Path) -> None:
    write(REPORT, tmp_path / "report.json")
    value = json.loads((tmp_path / "report.json").read_text())
    assert {"passed", "config", "row", "group_size", "prompt_tokens", "response_tokens", "comparisons"} <= value.keys()
    first, second = value["comparisons"]
    assert {"largest", "tolerance", "sample", "position"} <= first["logprobs"].keys()
    assert {"largest", "tolerance", "parameter", "parameters"} <= first["gradients"].keys()
    assert (first["name"], first["passed"], second["gradients"]) == ("split against unsplit", True, None)


def test_what_is_no_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"passed": 1}')
    with pytest.raises(DataError, match=r"x\.json: This is no report"):
        read(tmp_path / "x.json")


def test_the_words_say_what_was_compared_and_where_the_largest_difference_is() -> None:
    text = "\n".join(lines(REPORT))
    assert "row 4 of rows.jsonl: a prompt of 31 tokens with 2 images, 3 responses of 5 to 26 tokens, float32" in text
    assert "sample 3, token 7 (40 tokens)" in text
    assert "lm_head.weight (57 parameters)" in text
    assert "BEYOND" not in text
    assert text.endswith("verified: all within tolerance")


def test_what_is_beyond_a_tolerance_is_marked_counted_and_named_at_the_end() -> None:
    wrong = replace(GRADIENTS, largest=0.5, beyond=2)
    first = replace(REPORT.comparisons[0], passed=False, gradients=wrong)
    text = "\n".join(lines(replace(REPORT, passed=False, comparisons=(first, REPORT.comparisons[1]))))
    (marked,) = [line for line in text.splitlines() if "BEYOND" in line]
    assert marked.split()[:3] == ["gradients", "0.5", "0.0001"]
    assert "lm_head.weight (57 parameters, 2 beyond)  BEYOND" in marked
    assert text.endswith("NOT verified: split against unsplit")


def test_numbers_that_are_none_and_gradients_that_are_all_0_are_said_in_words() -> None:
    nan = replace(LOGPROBS, largest=None, beyond=1)
    nothing = replace(GRADIENTS, largest=0.0, parameter="", parameters=57, zero=57)
    assert not nan.passed
    assert not nothing.passed
    first = replace(REPORT.comparisons[0], passed=False, logprobs=nan, gradients=nothing)
    text = "\n".join(lines(replace(REPORT, passed=False, comparisons=(first,))))
    assert "not a number" in text
    assert "nothing to compare: all 57 parameters have gradient 0" in text


def test_zero_gradients_of_some_parameters_pass_and_are_counted() -> None:
    some = replace(GRADIENTS, zero=30)
    assert some.passed
    first = replace(REPORT.comparisons[0], gradients=some)
    assert "57 parameters, 30 of them 0 in both" in "\n".join(lines(replace(REPORT, comparisons=(first,))))


def test_a_report_in_bfloat16_says_that_it_finds_gross_errors_only() -> None:
    *_, verdict, note = lines(replace(REPORT, dtype="bfloat16"))
    assert verdict == lines(REPORT)[-1] == "verified: all within tolerance"
    assert note == "(bfloat16 shows gross errors only; `--set model.dtype=float32` is the sharp check)"
