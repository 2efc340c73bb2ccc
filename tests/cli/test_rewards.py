"""`rollplex rewards check`: reward functions on made-up responses, without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex.cli.app import run
from support.reward_child import write_tokenizer

ROWS = [
    {"prompt": "2 + 2 = ", "answer": "4"},
    {"prompt": "where?", "answer": [0, 0, 10, 10]},
    {"prompt": "nobody knows", "level": 1},
]
EXACT = {"function": "rollplex.rewards.ready:exact"}


@pytest.fixture
def job(config_file: Path) -> Path:
    """The configuration with a tokenizer, rows, and a file of functions."""
    folder = config_file.parent
    (folder / "model" / "config.json").write_text("{}")
    write_tokenizer(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "score.py").write_text(
        "def score(completions, finish_reasons): return [0.5 * len(text) for text in completions]\n"
        "def picky(completions, level): return [1.0] * len(completions)\n"
        "def never(completions): return [None] * len(completions)\n"
    )
    return config_file


def check(job: Path, functions: list[dict[str, object]], *more: str) -> int:
    return run(["rewards", "check", str(job), "--set", f"rewards.functions={json.dumps(functions)}", *more])


def test_right_answers_and_an_empty_response_are_scored_as_a_run_would(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score = {"function": f"{job.parent}/score.py:score", "weight": 2.0}
    assert check(job, [score, {**EXACT, "weight": 0.5}], "--rows", "1") == 0
    assert capsys.readouterr().out.splitlines() == [
        (
            "score of score.py is taken as TRL's, because of completions, finish_reasons; "
            "arguments (completions, finish_reasons)"
        ),
        (
            "exact of rollplex.rewards.ready is taken as TRL's, because of completions; "
            "arguments (completions, *, column='', ignore_case=True, **columns)"
        ),
        "row  function      right answer  in tags  empty",
        "0    score         0.5           16.5     0",
        "0    exact         1             1        0",
        "0    weighted sum  1.5           33.5     0",
        "the right answer is worth more than an empty response in 1 of 1 rows",
    ]


def test_functions_that_do_not_tell_right_from_empty_are_pointed_out(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(job, [{"function": f"{job.parent}/score.py:never"}]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5:] == [
        "row  function  right answer  in tags  empty",
        "0    never     none          none     none",
        "1    never     none          none     none",
        "2    never     -             -        none",
        (
            "the right answer is worth more than an empty response in 0 of 2 rows: "
            "look at the functions, or at what form of answer they want"
        ),
    ]


def test_a_function_that_fails_is_named_with_the_row_and_the_others_go_on(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(job, [{"function": f"{job.parent}/score.py:picky"}]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[2] == "2    picky     -             -        1"
    assert lines[3].startswith(f"failed: {job.parent}/rows.jsonl:1 (row 0): picky raised: The function asks for what")
    assert lines[-1] == "2 rows failed"
    assert not err


def test_what_cannot_be_loaded_is_one_line(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(job, [{"function": f"{job.parent}/score.py:scroe"}]) == 1
    assert capsys.readouterr().err.startswith(f"error: {job.parent}/score.py:scroe: There is no such function")
    assert check(job, [{**EXACT, "signature": "xyz"}]) == 2
