"""training/state.json of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.checkpoint.state import STATE_FILE, RunState, encode, read
from rollplex.errors import CheckpointError

STATE = RunState(
    step=3,
    version=2,
    seed=7,
    failed_votes=1,
    table_hash="t",
    config="a: 1\n",
    fingerprints={"model": "m"},
)


def _write(folder: Path, text: str) -> Path:
    file = folder / STATE_FILE
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    return file


def test_what_was_written_is_read(tmp_path: Path) -> None:
    _write(tmp_path, encode(STATE))
    assert read(tmp_path) == STATE


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", encode(STATE).replace('"step":3', '"step":-1'), encode(STATE).replace("seed", "sead")]
)
def test_what_is_not_of_this_form_is_refused_with_the_file(tmp_path: Path, text: str) -> None:
    file = _write(tmp_path, text)
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path)
    assert raised.value.where == str(file)


def test_another_format_is_named(tmp_path: Path) -> None:
    _write(tmp_path, encode(STATE).replace('"format":1', '"format":2'))
    with pytest.raises(CheckpointError, match=r"another format; got 2; needed 1"):
        read(tmp_path)


def test_a_folder_without_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        read(tmp_path)
