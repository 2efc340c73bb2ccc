"""The lines of completions.jsonl: complete, one for each response, and JSON whatever the model wrote."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from rollplex.protocol.common import Logprobs, Responses
from rollplex.protocol.reward import GroupRewarded
from rollplex_coordinator.records.completions import Spoken, completions_of, lines
from support.files import completion
from support.workers import doubles

NAN = float("nan")


def read(text: bytes) -> list[dict[str, Any]]:
    """As a strict reader does: UTF-8, and a line for each that `splitlines` sees."""
    return [json.loads(line) for line in text.decode("utf-8").splitlines()]


def test_a_group_gives_a_line_for_each_response() -> None:
    message = GroupRewarded(
        cause=1, step=7, group=2, rewards=doubles(1.0, NAN), by_function=(doubles(1.0, NAN), doubles(NAN, NAN)),
        texts=("seven", "…"), start_s=0.0, end_s=1.0,
    )  # fmt: skip
    found = completions_of(
        message, source="held_out", version=6, row=40, group=18, lengths=(2, 5), stopped=(True, False),
        names=("right", "short"), advantages=(0.5, NAN),
    )  # fmt: skip
    same = {"source": "held_out", "step": 7, "version": 6, "row": 40, "group": 18}
    assert read(lines(found)) == [
        {**same, "sample": 0, "completion": "seven", "reward": 1.0, "rewards": {"right": 1.0, "short": None},
         "advantage": 0.5, "tokens": 2, "stopped": True},
        {**same, "sample": 1, "completion": "…", "reward": None, "rewards": {"right": None, "short": None},
         "advantage": None, "tokens": 5, "stopped": False},
    ]  # fmt: skip


def test_tokens_are_written_down_bit_for_bit_if_they_are_to_be_replayed() -> None:
    message = GroupRewarded(
        cause=1, step=0, group=2, rewards=doubles(1.0, 0.0), by_function=(doubles(1.0, 0.0),), texts=("a", "b"),
        start_s=0.0, end_s=1.0,
    )  # fmt: skip
    values = (-0.1, -1 / 3, -2.0)
    tokens = Responses(group=2, lengths=(2, 1), tokens=struct.pack("<3i", 7, 151_935, 3))
    found = completions_of(
        message, source="train", version=0, row=1, group=2, lengths=(2, 1), stopped=(True, False), names=("right",),
        spoken=Spoken(
            tokens=tokens,
            rollout=Logprobs(group=2, values=doubles(*values)),
            trainer=Logprobs(group=2, values=doubles(-0.5, -0.25, -4.0)),
        ),
    )  # fmt: skip
    first, second = read(lines(found))
    assert (first["ids"], second["ids"]) == ([7, 151_935], [3])
    assert (*first["logprobs"], *second["logprobs"]) == values
    assert (first["trainer_logprobs"], second["trainer_logprobs"]) == ([-0.5, -0.25], [-4.0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        'a "quoted" \\ text',
        "two\nlines\r\n",
        "\x00\x1f\x7f",
        "\u0085\u2028\u2029",
        "日本語 🙂",
        "\v\f\x1c",
        "\ufeff",
    ],
)
def test_any_text_is_one_line_and_comes_back(text: str) -> None:
    (row,) = read(lines([completion(text)]))
    assert row["completion"] == text


def test_what_utf8_cannot_carry_is_escaped_and_the_rest_is_kept() -> None:
    (row,) = read(lines([completion("a\ud800b\u2028")]))
    assert row["completion"] == "a\\ud800b\u2028"
    assert row["rewards"] == {"right": 1.0}


def test_the_responses_of_an_evaluation_have_no_advantage() -> None:
    message = GroupRewarded(
        cause=1,
        step=7,
        group=0,
        rewards=doubles(1.0),
        by_function=(doubles(1.0),),
        texts=("a",),
        start_s=0.0,
        end_s=1.0,
    )
    found = completions_of(
        message, source="held_out", version=6, row=4, group=0, lengths=(2,), stopped=(True,), names=("right",)
    )
    assert [row["advantage"] for row in read(lines(found))] == [None]
