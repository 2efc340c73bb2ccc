"""The byte between the coordinator and an engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollplex.multiprocessors.beside import FILE, Beside, Watch


def test_what_is_said_is_seen_through_an_older_mapping(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    seen = Watch(tmp_path)
    told = []
    for said in (False, True, True, False, True):
        beside.say(beside=said)
        told.append(seen())
    assert told == [False, True, True, False, True]


def test_a_file_of_an_earlier_run_says_no_again(tmp_path: Path) -> None:
    Beside(tmp_path).say(beside=True)
    seen = Watch(tmp_path)
    Beside(tmp_path)
    assert not seen()


def test_the_same_thing_is_not_written_twice(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    (tmp_path / FILE).unlink()
    beside.say(beside=False)
    with pytest.raises(FileNotFoundError):
        beside.say(beside=True)


def test_nobody_to_watch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Watch(tmp_path)


def test_the_file_is_ours_alone(tmp_path: Path) -> None:
    Beside(tmp_path)
    assert os.stat(tmp_path / FILE).st_mode & 0o777 == 0o600  # noqa: PTH116
