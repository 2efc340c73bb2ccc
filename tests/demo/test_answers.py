"""Which answers belong to a scan, and which are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex.demo.answers import Answer, choose, read_answers
from rollplex.errors import DataError
from support.demo import Played


def _read(played: Played, step: int = 400) -> list[Answer]:
    return read_answers(played.run_dir, played.data, name="held_out", step=step)


def test_each_answer_has_the_picture_and_truth_of_its_row(played: Played) -> None:
    played.complete(played.responses(wrong=(2,)))
    answers = _read(played)
    rows = [json.loads(line) for line in played.data.read_text().splitlines()]
    assert [answer.row for answer in answers] == list(range(156))
    assert [answer.truth for answer in answers] == [row["answer"] for row in rows]
    assert [answer.picture for answer in answers] == [played.data.parent / row["images"][0] for row in rows]
    assert [answer.row for answer in answers if not answer.is_right] == [2]
    assert all(answer.picture.is_file() for answer in answers)


def test_only_the_evaluation_and_step_that_were_asked_for_count(played: Played) -> None:
    played.complete(["x", "x"], step=0)
    played.complete(played.responses()[:2], step=200)
    played.complete(["7", "7", "7"], step=200, source="train")
    played.complete(["7", "7", "7"], step=200, source="held_out_grey")
    with (played.run_dir / "completions.jsonl").open("a") as file:
        file.write('{"source": "train", "step": 200, "row": 0, "note": "held_out"}\n')
    assert [answer.is_right for answer in _read(played, 0)] == [False, False]
    assert [answer.is_right for answer in _read(played, 200)] == [True, True]


def test_a_run_that_kept_no_answers_has_none(played: Played) -> None:
    assert _read(played) == []


def test_a_row_that_the_data_do_not_have_is_an_error(played: Played) -> None:
    sample = {"source": "held_out", "step": 400, "row": 156, "completion": "4", "rewards": {"right": 1.0}}
    (played.run_dir / "completions.jsonl").write_text(json.dumps(sample) + "\n")
    with pytest.raises(DataError, match="row 156 of 156"):
        _read(played)


@pytest.mark.parametrize(
    ("response", "shown"),
    [("4q", "4"), (" four", "4"), ("fourq", '"fourq"'), ("\x1b[2Jé", '".[2J."'), ("", '""')],
)
def test_an_answer_is_shown_as_its_digit_or_else_as_harmless_text(response: str, shown: str) -> None:
    assert Answer(row=0, picture=Path(), truth="4", response=response, is_right=False).shown == shown


def _answers(truths: str, wrong: tuple[int, ...] = ()) -> list[Answer]:
    return [
        Answer(row=row, picture=Path(), truth=truth, response="", is_right=row not in wrong)
        for row, truth in enumerate(truths)
    ]


def test_right_answers_of_every_digit_and_the_first_mistakes_are_chosen() -> None:
    answers = _answers("4444000017170000", wrong=(1, 12, 13))
    chosen = choose(answers, count=8, wrong=2)
    assert [answer.row for answer in chosen] == [0, 1, 2, 4, 5, 8, 9, 12]


def test_without_mistakes_right_answers_take_their_places() -> None:
    assert [answer.row for answer in choose(_answers("0" * 20), count=8, wrong=2)] == list(range(8))


def test_without_right_answers_mistakes_take_their_places() -> None:
    chosen = choose(_answers("0" * 20, wrong=tuple(range(1, 20))), count=8, wrong=2)
    assert [answer.row for answer in chosen] == list(range(8))


def test_of_fewer_scans_all_are_chosen() -> None:
    assert len(choose(_answers("014", wrong=(0,)), count=8, wrong=2)) == 3
    assert choose([], count=8, wrong=2) == []
