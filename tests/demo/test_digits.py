"""The digits as files, and the demo's folder."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollplex.config import load
from rollplex.config.wire import reward_functions
from rollplex.demo import rewards
from rollplex.demo.digits import QUESTION, write_digits
from rollplex.demo.recipe import ACCURACY, make_config, write_demo
from rollplex.errors import DataError
from rollplex.layout.shape import media_ids, read_shape
from rollplex.presets import SPECIAL_TOKENS

FILES = ("train.jsonl", "held_out.jsonl", "held_out_grey.jsonl")


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _pixels(file: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with Image.open(file) as picture:
        assert picture.format == "PNG"
        assert picture.mode == "RGB"
        return np.asarray(picture)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All ten digits."""
    folder = tmp_path_factory.mktemp("digits")
    written = write_digits(folder)
    assert (written.num_train, written.num_held_out) == (1400, 397)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick demo's folder."""
    return write_demo(tmp_path_factory.mktemp("demo"), quick=True).config.parent


def test_a_row_is_what_the_readers_of_rows_expect(folder: Path) -> None:
    row = _rows(folder / "train.jsonl")[0]
    assert row["prompt"] == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    assert list(row) == ["prompt", "images", "answer"]
    assert len(row["images"]) == 1
    assert (folder / row["images"][0]).is_file()
    assert row["answer"] in "0123456789"


def test_every_scan_is_used_once_and_none_is_both_learned_and_held_out(folder: Path) -> None:
    train = [row["images"][0] for row in _rows(folder / "train.jsonl")]
    held_out = [row["images"][0] for row in _rows(folder / "held_out.jsonl")]
    assert sorted(train + held_out) == [f"images/{number:04d}.png" for number in range(1, 1798)]
    assert len(list((folder / "images").iterdir())) == 1797 + 1


def test_pictures_are_the_scans_enlarged_and_answers_are_their_digits(folder: Path) -> None:
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    rows = _rows(folder / "train.jsonl")
    for row in rows[:40]:
        scan = int(row["images"][0][7:11]) - 1
        assert row["answer"] == str(bunch.target[scan])
        pixels = _pixels(folder / row["images"][0])
        assert pixels.shape == (56, 56, 3)
        assert (pixels[..., :1] == pixels).all()
        means = pixels[..., 0].astype(float).reshape(8, 7, 8, 7).mean(axis=(1, 3))
        assert np.corrcoef(means.ravel(), bunch.images[scan].ravel())[0, 1] > 0.97


def test_the_values_0_to_16_become_0_to_255(folder: Path) -> None:
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    for row in _rows(folder / "train.jsonl")[:20]:
        pixels = _pixels(folder / row["images"][0])
        assert pixels.min() == 0
        assert pixels.max() > 230
        expected = bunch.images[int(row["images"][0][7:11]) - 1].mean() * 255 / 16
        assert abs(pixels.mean() / expected - 1) < 0.03


def test_the_grey_control_has_the_held_out_rows_with_a_picture_that_shows_nothing(folder: Path) -> None:
    held_out, grey = _rows(folder / "held_out.jsonl"), _rows(folder / "held_out_grey.jsonl")
    assert [row | {"images": 0} for row in held_out] == [row | {"images": 0} for row in grey]
    assert {row["images"][0] for row in grey} == {"images/grey.png"}
    assert (_pixels(folder / "images/grey.png") == 128).all()


def test_digits_are_in_a_mixed_order(folder: Path) -> None:
    answers = [row["answer"] for row in _rows(folder / "train.jsonl")]
    for start in range(0, 1400, 200):
        assert len(set(answers[start : start + 200])) == 10


def test_the_split_is_the_same_for_a_choice_of_digits(folder: Path, tmp_path: Path) -> None:
    written = write_digits(tmp_path, digits=(0, 7))
    for name in FILES:
        assert _rows(tmp_path / name) == [row for row in _rows(folder / name) if row["answer"] in "07"]
    assert written.num_train == len(_rows(tmp_path / "train.jsonl"))
    assert len(list((tmp_path / "images").iterdir())) == written.num_train + written.num_held_out + 1


def test_a_seed_gives_the_same_bytes_again_and_another_another_split(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_digits(tmp_path / name, digits=(1,), seed=seed)
    for file in [*(f"{n}" for n in FILES), *(f"images/{p.name}" for p in (tmp_path / "a/images").iterdir())]:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert _rows(tmp_path / "a/held_out.jsonl") != _rows(tmp_path / "c/held_out.jsonl")


def test_what_is_no_digit_is_refused(tmp_path: Path) -> None:
    for digits in ((), (1, 10), (-1,)):
        with pytest.raises(DataError, match="0 to 9"):
            write_digits(tmp_path, digits=digits)


def test_without_scikit_learn_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(DataError, match=r"rollplex\[demo\]"):
        write_digits(tmp_path)


@pytest.mark.parametrize(("is_quick", "digits", "iterations"), [(True, "0147", 400), (False, "0123456789", 1800)])
def test_the_demo_folder_is_a_configuration_that_can_run(
    tmp_path: Path, is_quick: bool, digits: str, iterations: int
) -> None:
    demo = write_demo(tmp_path, quick=is_quick)
    config = load(demo.config)
    assert "".join(map(str, demo.digits)) == digits
    assert demo.chance == 1 / len(digits)
    assert config.run.iterations == iterations
    assert {row["answer"] for row in _rows(config.data.path)} == set(digits)
    assert len(_rows(config.eval[0].data)) == demo.rows.num_held_out


def test_the_recipe_is_the_one_that_was_seen_to_learn(quick: Path) -> None:
    config = load(quick / "config.yaml")
    assert (config.data.prompts_per_iteration, config.rollout.group_size, config.rollout.max_new_tokens) == (16, 8, 2)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.warmup_steps) == (1.5e-3, (0.9, 0.95), 5)
    assert (config.optimizer.schedule, config.optimizer.final_lr_ratio) == ("linear", 0.05)
    assert (config.algorithm.beta, config.algorithm.entropy_bonus) == (0.001, 0.05)
    assert (config.algorithm.scale_rewards, config.optimizer.max_grad_norm) == ("none", 1.0)
    assert config.run.threads == 1


def test_only_text_and_the_end_of_the_turn_are_sampled(quick: Path) -> None:
    from transformers import AutoTokenizer

    config = load(quick / "config.yaml")
    tokenizer: Any = AutoTokenizer.from_pretrained(config.model.path)
    shape = read_shape(config.model.path)
    barred = {tokenizer.convert_tokens_to_ids(token) for token in config.rollout.never_sample} | set(media_ids(shape))
    special = {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    assert special - barred == set(shape.eos_ids)
    assert barred <= special


def test_accuracy_is_reported_by_a_function_that_is_not_learned_from(quick: Path) -> None:
    functions = reward_functions(load(quick / "config.yaml"))
    assert [(function.spec, function.weight) for function in functions] == [
        ("rollplex.demo.rewards:digit_reward", 1.0),
        ("rollplex.demo.rewards:right", 0.0),
    ]
    assert f"rewards/{rewards.right.__name__}/mean" == ACCURACY


def test_accuracy_is_measured_before_the_first_and_after_the_last_iteration(quick: Path) -> None:
    held_out, grey = load(quick / "config.yaml").eval
    assert held_out.due(0, last=False)
    assert held_out.due(400, last=True)
    assert not grey.due(0, last=False)
    assert grey.due(400, last=True)


def test_both_sizes_differ_only_in_their_length_and_name() -> None:
    quick, full = make_config(quick=True), make_config(quick=False)
    for key in ("model", "data", "rollout", "rewards", "algorithm", "optimizer"):
        assert quick[key] == full[key]


def test_writing_the_demo_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rollplex.demo.recipe import write_demo;"
        f"write_demo(Path({str(tmp_path)!r}), quick=True); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
