"""The fingerprint of a model folder while it is computed beside everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollplex.errors import ModelError, WaitError
from rollplex_coordinator import fingerprints
from rollplex_coordinator.fingerprints import ModelFingerprint
from rollplex_coordinator.ready import _awaited

JOIN_S = 10.0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set: the folder has been read."""
    there = threading.Event()

    def slow(_folder: Path) -> str:
        assert there.wait(JOIN_S)
        return "abc"

    monkeypatch.setattr(fingerprints, "folder_fingerprint", slow)
    yield there
    there.set()


def node(on_turn: Callable[[], None], load_s: float = JOIN_S) -> Any:
    """One whose loop turns until it is told not to."""

    def pump(until: Callable[[], bool]) -> None:
        while not until():
            on_turn()

    return SimpleNamespace(
        link=SimpleNamespace(pump=pump), config=SimpleNamespace(deadlines=SimpleNamespace(load_s=load_s))
    )


def test_the_loop_turns_until_the_folder_has_been_read(read: threading.Event, tmp_path: Path) -> None:
    files, turns = ModelFingerprint(tmp_path), []

    def turn() -> None:
        assert not files.done
        turns.append(1)
        if len(turns) == 3:
            read.set()
            files._thread.join(JOIN_S)

    assert _awaited(node(turn), files) == "abc"
    assert len(turns) == 3


def test_a_folder_that_takes_too_long_is_an_error_that_says_what_to_change(
    read: threading.Event, tmp_path: Path
) -> None:
    with pytest.raises(WaitError, match=r"could not be read in time; got more than 0.05 s\. Raise deadlines.load_s"):
        _awaited(node(lambda: None, load_s=0.05), ModelFingerprint(tmp_path))


def test_a_folder_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(folder: Path) -> str:
        raise ModelError("no", where=str(folder))

    monkeypatch.setattr(fingerprints, "folder_fingerprint", broken)
    with pytest.raises(ModelError, match="no"):
        _awaited(node(lambda: None), ModelFingerprint(tmp_path))
