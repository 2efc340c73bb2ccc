"""`rollplex data check`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.config.yaml_text import dumps
from rollplex.presets import TINY, write_preset

SHAPES = Path(__file__).parents[1] / "data" / "shapes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(TINY.name, tmp_path_factory.mktemp("m") / "model")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    shutil.copytree(SHAPES / "images", tmp_path / "images")
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"prompt": [{"role": "user", "content": text}], "images": images})
            for text, images in (("<image>?", ["images/red.png"]), ("<image>", []), ("<image>?", ["images/red.png"]))
        )
    )
    return path


def test_a_good_dataset_is_shown_and_ends_with_0(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", str(SHAPES / "easyr1.json"), "--model", str(model)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{SHAPES / 'easyr1.json'}: 4 rows; JSON, shape easyr1\ncolumns problem, answer, images\n")
    assert "images 4, videos 0, rows without either 1\n" in text
    assert "sides of images in pixels, √(width × height); 56 × 56 to 56 × 56: 56 to 56, median 56\n" in text
    assert f"  32 to 63  {'█' * 40} 4\n" in text
    assert "tokens of a prompt, media included: 32 to 45, median 35\n" in text
    assert "\nerrors: none\n" in text
    assert (
        "as the model gets it, 32 tokens:\n<|im_start|>user\n<|vision_start|>[image 1: 4 tokens]<|vision_end|>what"
        in text
    )


def test_errors_end_with_1_and_are_counted_by_kind(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [{"prompt": "?", "images": [f"{number}.png"]} for number in range(30)]
    rows.write_text("\n".join([rows.read_text(), *map(json.dumps, bad)]))
    assert run(["data", "check", str(rows)]) == 1
    text = capsys.readouterr().out
    assert ": 33 rows, 3 good; JSON lines, shape trl\n" in text
    assert "errors: 30\n      30  This file cannot be opened\n" in text
    assert f"error: {rows}:4 (row 3): This file cannot be opened; got '0.png': No such file or directory" in text
    assert "error: … and 10 more rows\n" in text


def test_warnings_end_with_0_and_strictly_with_1(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", str(rows)]) == 0
    text = capsys.readouterr().out
    assert "warning: <image> stands in the text of 1 row (1) without images, and is taken as text\n" in text
    assert "warning: 1 row (2) repeats the prompt and the media of another, e.g. row 2 those of row 0\n" in text
    assert "checked without a model: prompts were not tokenized (--model DIR or --config CONFIG)\n" in text
    assert run(["data", "check", str(rows), "--strict"]) == 1


def test_the_report_as_json_has_the_same_exit_code(rows: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", str(rows), "--model", str(model), "--json", "--strict"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["num_errors"], len(report["warnings"])) == (3, 0, 2)
    assert report["prompt_tokens"]["least"] > 0


def test_a_configuration_says_how_rows_are_read_and_what_is_too_long(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"q": "what <image>?", "pic": "images/red.png", "reply": "r"}, {"q": "?", "pic": None, "reply": "s"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = tmp_path / "config.yaml"
    values = {
        "model": {"path": str(model)},
        "data": {
            "path": "rows.json",
            "image_dir": str(SHAPES),
            "columns": {"problem": "q", "images": "pic", "answer": "reply"},
            "format_prompt": "{{ content }} Think!",
            "max_pixels": 784,
        },
        "rewards": {"functions": [{"function": "absent.py:right"}]},
    }
    config.write_text(dumps(values))
    assert run(["data", "check", "--config", str(config)]) == 0
    text = capsys.readouterr().out
    assert "shape easyr1\n" in text
    assert "what <|vision_start|>[image 1: 1 token]<|vision_end|>? Think!<|im_end|>" in text
    other = tmp_path / "deep" / "other.json"
    other.parent.mkdir()
    other.write_text(json.dumps(rows[:1]))
    arguments = ["data", "check", str(other), "--config", str(config), "--set", "data.max_prompt_tokens=5"]
    assert run(arguments) == 1
    assert f"error: {other} (row 0): This prompt is too long; got " in capsys.readouterr().out


def test_options_are_given_as_keys_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "problem": "q", "answer": "a", "images": "red.png"}')
    monkeypatch.chdir(tmp_path)
    arguments = ["data", "check", "a.jsonl", "--set", "data.shape=easyr1", "--image-dir", str(SHAPES / "images")]
    assert run(arguments) == 0
    assert f"{tmp_path / 'a.jsonl'}: 1 rows; JSON lines, shape easyr1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "No dataset is named; needed FILE, or --config CONFIG"),
        (["absent.jsonl"], "absent.jsonl': No such file or directory"),
        (["empty.jsonl"], "This dataset has no rows"),
        (["odd.jsonl"], "The columns fit no known shape"),
        (["odd.jsonl", "--set", "data.shape=vreal"], "data.shape has a value that cannot be used"),
        (["odd.jsonl", "--set", "data.image_directory=x"], "Unknown key data.image_directory"),
        (["good.jsonl", "--image-dir", "absent"], "The image folder cannot be opened"),
        (["good.jsonl", "--model", "absent"], "The model folder is not there or holds no config.json; got absent"),
        (["good.jsonl", "--config", "absent.yaml"], "absent.yaml: The configuration cannot be read"),
        (["good.jsonl", "--nonsense"], "No such option"),
    ],
)
def test_what_cannot_be_checked_ends_with_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "odd.jsonl").write_text('{"query": "q"}')
    (tmp_path / "good.jsonl").write_text('{"prompt": "q"}')
    assert run(["data", "check", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
