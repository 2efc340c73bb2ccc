"""TRL's batch signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollplex.rewards.arguments import Arguments
from rollplex.rewards.call import Call
from rollplex.rewards.trl import TrainerState, bind, offered

MakeCall = Callable[..., Call]
CHAT = [{"role": "user", "content": "which digit?"}]


def every(**kwargs: Any) -> dict[str, Any]:
    return kwargs


def test_a_conversational_prompt_gives_conversational_completions(make_call: MakeCall) -> None:
    call = make_call({"prompt": CHAT, "answer": "7", "images": ["a.png"]})
    given = offered(call, Arguments(every))
    assert given == {
        "prompts": [CHAT] * 3,
        "completions": [[{"role": "assistant", "content": text}] for text in ("7", "8", "")],
        "completion_ids": [[1, 9], [2, 3], [9]],
        "completion_lengths": [2, 2, 1],
        "finish_reasons": ["stop", "length", "stop"],
        "step": 4,
        "trainer_state": TrainerState(global_step=4),
        "log_metric": call.log_metric,
        "answer": ["7"] * 3,
        "images": [["a.png"]] * 3,
    }


def test_a_plain_prompt_gives_plain_texts(make_call: MakeCall) -> None:
    given = offered(make_call({"prompt": "2 + 2 = ", "completion": "x", "n": 3}), Arguments(every))
    assert given["prompts"] == ["2 + 2 = "] * 3
    assert given["completions"] == ["7", "8", ""]
    assert given["n"] == [3] * 3
    assert "completion" not in given


def test_a_column_comes_before_what_we_offer_under_its_name(make_call: MakeCall) -> None:
    row = {"prompt": "a", "step": "knead", "finish_reasons": 1, "trainer_state": None}
    given = offered(make_call(row), Arguments(every))
    assert given["step"] == ["knead"] * 3
    assert given["finish_reasons"] == [1] * 3
    assert given["trainer_state"] == [None] * 3


def test_images_are_decoded_once_and_only_for_a_function_that_names_them(make_call: MakeCall) -> None:
    loads: list[int] = []

    def load() -> list[object]:
        loads.append(1)
        return ["picture"]

    call = make_call({"prompt": "a"}, load_images=load)

    def looks(completions: Any, pil_images: Any, **kwargs: Any) -> Any:
        return pil_images

    assert "pil_images" not in offered(call, Arguments(every))
    assert not loads
    assert bind(looks, Arguments(looks))(call) == [["picture"]] * 3
    assert loads == [1]


def test_numbers_that_a_function_logs_are_kept_if_they_are_finite(make_call: MakeCall) -> None:
    def f(completions: Any, log_metric: Any) -> list[float]:
        for value in (0.5, True, float("nan"), float("inf"), "text", None):
            log_metric("seen", value)
        return [0.0] * len(completions)

    call = make_call({"prompt": "a"})
    assert bind(f, Arguments(f))(call) == [0.0] * 3
    assert call.logged == {"seen": [0.5, 1.0]}


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_completion_is_a_text_like_any_other(make_call: MakeCall, text: str) -> None:
    call = make_call({"prompt": "a"}, texts=[text] * 3, ids=[[9]] * 3)
    assert offered(call, Arguments(every))["completions"] == [text] * 3
