"""Functions with verl's and EasyR1's signatures, and what functions may ask for, through the reward child."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from PIL import Image

from rollplex.errors import RewardError
from rollplex.protocol.inputs import DataSource
from rollplex.protocol.reward import Form, RewardProblem
from support.reward_child import Child, numbers, signed

Functions = Callable[[str], Path]
NEEDED = " (needed: a number, or a dict with it as 'score')"


def test_verl_s_dicts_give_rewards_and_parts(child: Child, functions: Functions) -> None:
    path = functions(
        "import numpy as np\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, right=1.0):\n"
        "    acc = solution_str == 'seven' and ground_truth == '7' and data_source == 'train' and extra_info == {}\n"
        "    pred = {} if not solution_str else {'half': np.float32(0.5)}\n"
        "    return {'score': right * acc, 'acc': acc, 'pred': solution_str, 'bad': float('nan'), **pred}\n"
    )
    opened = child.open(signed(path, "compute_score", right=2))
    (note,) = opened.notes
    assert note == (
        f"compute_score of {path.name} is taken as verl's, because of solution_str; "
        "arguments (data_source, solution_str, ground_truth, extra_info=None, right=1.0)"
    )
    answer = child.rewarded()
    assert numbers(answer.rewards) == [2.0, 0.0, 0.0]
    parts = {part.name: numbers(part.values) for part in answer.parts}
    assert parts == {"acc": [1.0, 0.0, 0.0], "half": [0.5, 0.5]}
    assert {part.function for part in answer.parts} == {0}


def test_easyr1_s_dicts_give_rewards_and_parts_and_log_metric_too(child: Child, functions: Functions) -> None:
    path = functions(
        "def compute_score(reward_inputs):\n"
        "    return [{'overall': i['response_length'], 'format': 0.5} for i in reward_inputs]\n"
        "def trl(prompts, log_metric):\n"
        "    log_metric('share', 0.25)\n"
        "    return [0.0] * len(prompts)\n"
    )
    child.open(signed(path, "compute_score"), signed(path, "trl"))
    answer = child.rewarded()
    assert numbers(answer.rewards) == numbers(answer.by_function[0])
    assert [(p.function, p.name, numbers(p.values)) for p in answer.parts] == [
        (0, "format", [0.5] * 3),
        (1, "share", [0.25]),
    ]


def test_coroutines_of_single_samples_run_together(child: Child, functions: Functions) -> None:
    path = functions(
        "import asyncio\n"
        "waiting = []\n"
        "async def compute_score(solution_str):\n"
        "    waiting.append(solution_str)\n"
        "    while len(waiting) < 3: await asyncio.sleep(0)\n"
        "    if solution_str == 'bad': raise KeyError('no')\n"
        "    return float(len(solution_str))\n"
    )
    child.open(signed(path, "compute_score"))
    assert numbers(child.rewarded().rewards) == [5.0, 1.0, 0.0]
    failure = child.ask(child.group(0, ["good", "bad", "x"]))
    assert failure.problem is RewardProblem.RAISED
    assert failure.detail.startswith("sample 1: KeyError: 'no'")


@pytest.mark.parametrize(
    ("body", "problem", "detail"),
    [
        (
            "return {'reward': 1}",
            "wrong_type",
            f"sample 0: dict {{'reward': 1}}{NEEDED}",
        ),
        ("return {'score': '1'}", "wrong_type", f"sample 0: str '1'{NEEDED}"),
        ("return {'score': float('inf')}", "not_finite", "sample 0: inf, not between -1e18 and 1e18"),
        (
            "return (1.0, 2.0)",
            "wrong_type",
            f"sample 0: tuple (1.0, 2.0){NEEDED}",
        ),
        ("return 1 / len(solution_str)", "raised", "sample 2: ZeroDivisionError: division by zero"),
    ],
)
def test_what_single_samples_return_is_checked_too(
    body: str, problem: str, detail: str, child: Child, functions: Functions
) -> None:
    child.open(signed(functions(f"def compute_score(solution_str):\n    {body}\n"), "compute_score"))
    failure = child.failed()
    assert (failure.problem, failure.detail.splitlines()[0]) == (problem, detail)


def test_images_are_decoded_for_a_function_that_names_them(child: Child, functions: Functions, tmp_path: Path) -> None:
    Image.new("L", (4, 2), 200).save(tmp_path / "a.png")
    path = functions(
        "def f(prompts, images, pil_images):\n"
        "    assert images == [['a.png']] * 3 and pil_images[0] is pil_images[2]\n"
        "    (image,) = pil_images[0]\n"
        "    return [float(sum(image.size) + image.getpixel((0, 0))[0])] * 3\n"
    )
    child.open(signed(path, "f"))
    assert numbers(child.rewarded().rewards) == [206.0] * 3
    Image.new("L", (5, 2)).save(tmp_path / "a.png")
    assert child.failed().detail == "This image declares too many pixels: 'a.png', 5 x 2 = 10 (needed: at most 8)"


def test_images_that_a_row_holds_itself_are_decoded_too_and_are_no_column(
    model_folder: Path, source: DataSource, functions: Functions, tmp_path: Path
) -> None:
    picture = io.BytesIO()
    Image.new("L", (4, 2), 200).save(picture, "PNG")
    row = {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": [{"bytes": picture.getvalue()}]}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    child = Child(model_folder, replace(source, path=str(path)))
    code = functions(
        "def f(prompts, pil_images, **columns):\n"
        "    assert 'images' not in columns\n"
        "    return [float(pil_images[0][0].size[0])] * 3\n"
    )
    child.open(signed(code, "f"))
    try:
        assert numbers(child.rewarded().rewards) == [4.0] * 3
    finally:
        child.service.close()


def test_a_signature_that_cannot_be_told_is_an_error_at_once(child: Child, functions: Functions) -> None:
    path = functions("def f(text, label): return 1.0\n")
    with pytest.raises(RewardError, match=r"fit no signature; got \(text, label\)"):
        child.open(signed(path, "f"))
    with pytest.raises(RewardError, match=r"no argument 'right'"):
        child.open(signed(path, "f", Form.VERL, right=1))
