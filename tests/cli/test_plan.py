"""`rollplex plan`: what it prints, from a published shape or from a model and data; and docs/plan.md."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from rollplex.cli.app import run
from rollplex.config.yaml_text import dumps
from rollplex.errors import RollplexError
from rollplex.planning.document import main, updated
from rollplex.planning.plan import Plan
from rollplex.presets import TINY, write_preset

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "tests" / "data" / "shapes"
PUBLISHED = ["--shape", "qwen2.5-vl-3b", "--prompt-tokens", "64", "--response-tokens", "32"]


def test_a_published_shape_needs_neither_model_nor_data(config_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    degrees = ["--gpus", "4", "--train-tp", "4", "--rollout-tp", "2", "--hbm", "24GiB"]
    assert run(["plan", str(config_file), *PUBLISHED, *degrees, "--set", "model.dtype=bfloat16", "--json"]) == 0
    plan = msgspec.json.decode(capfd.readouterr().out, type=Plan)
    assert (plan.model, plan.dtype, plan.gpus, plan.hbm_bytes) == ("Qwen2.5-VL-3B", "bfloat16", 4, 24 * 2**30)
    assert (plan.replicas, plan.engines, plan.prompt_tokens, plan.response_tokens) == (1, 2, 64, 32)
    assert round(plan.weights.stored_bytes / 2**30, 3) == 3.499  # docs/layouts.md
    assert round(plan.weights.refreshed_bytes / 2**30, 3) == 1.748
    assert plan.weights.rebuilt_bytes == 0
    assert [one.name for one in plan.placements] == ["naive", "serial", "disaggregated", "rollplex"]


def test_lengths_come_from_the_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_preset(TINY.name, tmp_path / "model")
    shutil.copytree(SHAPES / "images", tmp_path / "images")
    shutil.copy(SHAPES / "easyr1.json", tmp_path / "rows.json")
    (tmp_path / "score.py").touch()
    file = tmp_path / "job.yaml"
    functions = [{"function": "score.py:score"}]
    file.write_text(
        dumps({"model": {"path": "model"}, "data": {"path": "rows.json"}, "rewards": {"functions": functions}})
    )
    assert run(["plan", str(file), "--json"]) == 0
    plan = msgspec.json.decode(capfd.readouterr().out, type=Plan)
    assert (plan.model, plan.prompt_tokens) == ("model", 45)  # as `rollplex data check` says
    assert plan.image_tokens > 0
    assert plan.weights.aliased_share == 1.0


def test_the_text_has_the_peaks_and_a_picture_is_drawn(config_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = config_file.parent / "plan.svg"
    assert run(["plan", str(config_file), *PUBLISHED, "--gpus", "2", "--plot", str(picture)]) == 0
    out = capfd.readouterr().out
    assert out.startswith(
        "Qwen2.5-VL-3B, float32, on 2 devices of 80.00 GiB: training TP 1 (x 2), rollout TP 1 (x 2)\n"
    )
    assert "at the peak, GiB of a device" in out
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert len(drawn) > 10_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "qwen2.5-vl-7b", "--gpus", "8", "--train-tp", "8"], "28 attention heads / 8 = 3.5"),
        (["--shape", "qwen9"], "This model's shape is not known"),
        (["--hbm", "much"], "is not a number of bytes"),
        (["--image-tokens", "65"], "no more image tokens"),
        (["--plot", "plan.pdf"], "A plot is not written in this format"),
    ],
)
def test_what_cannot_be_planned_ends_with_code_two(
    config_file: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run(["plan", str(config_file), *PUBLISHED, *arguments]) == 2
    captured = capfd.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert not captured.out


def test_the_document_says_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert updated(text) == text, "run: python -m rollplex.planning.document docs/plan.md"


def test_a_document_without_plans_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RollplexError, match="no plan in the document"):
        updated("```\n$ ls\n```\n")
    assert main([]) == 2
    assert "docs/plan.md" in capsys.readouterr().err
