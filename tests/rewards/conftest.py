"""A tokenizer, a dataset, and files of reward functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollplex.protocol.inputs import DataSource
from rollplex.rewards.call import Call
from support.reward_child import Child, write_tokenizer

ROWS: list[dict[str, object]] = [
    {"prompt": [{"role": "user", "content": "which digit?"}], "answer": "7", "images": ["a.png"], "level": {"n": [1]}},
    {"prompt": "2 + 2 = ", "answer": "4", "completion": "ignored"},
    {"prompt": "no answer here"},
]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> DataSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return DataSource(
        name="train",
        path=str(path),
        image_dir=str(tmp_path),
        max_prompt_tokens=0,
        max_image_pixels=8,
        skip_bad_rows=False,
    )


@pytest.fixture
def functions(tmp_path: Path) -> Callable[[str], Path]:
    """Write a file of functions; returns its path."""

    def write(code: str) -> Path:
        path = tmp_path / f"functions_{len(list(tmp_path.glob('functions_*')))}.py"
        path.write_text(code)
        return path

    return write


@pytest.fixture
def make_call() -> Callable[..., Call]:
    """A call for three completions of a row."""

    def make(row: dict[str, object], **changes: Any) -> Call:
        usual: dict[str, Any] = {
            "texts": ["7", "8", ""],
            "ids": [[1, 9], [2, 3], [9]],
            "stopped": [True, False, True],
            "step": 4,
            "source": "train",
        }
        return Call(row=row, **(usual | changes))

    return make


@pytest.fixture
def child(model_folder: Path, source: DataSource) -> Iterator[Child]:
    made = Child(model_folder, source)
    yield made
    made.service.close()
