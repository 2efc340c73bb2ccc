"""The same rows in the shapes of five trainers, through whole nodes: the same answers, the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollplex.protocol.inputs import ShapeName
from support.nodes import Finished, Start

SHAPES = Path(__file__).parents[1] / "data" / "shapes"
FILES = {
    ShapeName.TRL: "trl.jsonl",
    ShapeName.VERL: "verl.jsonl",
    ShapeName.EASYR1: "easyr1.json",
    ShapeName.MS_SWIFT: "ms_swift.jsonl",
    ShapeName.LLAVA: "llava.json",
}
SHORT = {"rollout.max_new_tokens": 12, "rollout.forced_lengths": [3, 4, 2, 6, 5, 9, 12]}


@pytest.fixture(scope="module")
def trl(start: Start) -> Finished:
    """Two iterations on the rows in TRL's shape, then an evaluation of them in each shape."""
    evaluations = [{"name": str(shape), "data": str(SHAPES / name)} for shape, name in FILES.items()]
    data = {"data.path": str(SHAPES / FILES[ShapeName.TRL]), "eval": evaluations}
    finished = start("--iterations", "2", overrides={**SHORT, **data}).wait()
    assert finished.code == 0, finished.stderr
    return finished


@pytest.fixture
def verl_folder(tmp_path: Path) -> Path:
    """verl's rows with the images inside, as a dataset of two splits."""
    import datasets as package

    datasets: Any = package
    datasets.disable_progress_bars()
    rows: list[dict[str, Any]] = [json.loads(line) for line in (SHAPES / "verl.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = [{"bytes": (SHAPES / image["path"]).read_bytes(), "path": None} for image in row["images"]]
    saved = datasets.Dataset.from_list(rows).cast_column("images", datasets.Sequence(datasets.Image()))
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(str(tmp_path / "verl"))
    return tmp_path / "verl"


def test_an_evaluation_answers_alike_in_every_shape(trl: Finished) -> None:
    rows = {str(row.pop("name")): row for row in trl.evals if row["step"] == 2}
    assert set(rows) == set(FILES)
    for row in rows.values():
        clockless = {key: value for key, value in row.items() if not key.startswith("time")}
        assert clockless == {key: rows["trl"][key] for key in clockless}


def test_training_from_a_dataset_folder_in_verls_shape_ends_with_the_weights_of_trls(
    trl: Finished, verl_folder: Path, start: Start
) -> None:
    data = {"data.path": str(verl_folder), "data.split": "train", "data.shape": "verl"}
    finished = start("--iterations", "2", overrides={**SHORT, **data}).wait()
    assert finished.code == 0, finished.stderr
    assert "data train: 4 rows" in finished.stderr
    assert finished.checkpoint() == trl.checkpoint()
