"""How many requests for past runs are served at once."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollplex_coordinator.archive.runs import Archive
from rollplex_coordinator.http import past
from rollplex_coordinator.http.errors import UnavailableError
from rollplex_coordinator.http.past import Past

DEADLINE_S = 10.0


def test_one_waits_for_its_turn_and_one_too_many_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past, "ASKING", past.READERS + 1)
    archive = Past(Archive(tmp_path))
    asked, had = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        with archive.reading():
            had.set()

    waiting = threading.Thread(target=wait, daemon=True)
    with ExitStack() as readers:
        for _ in range(past.READERS):
            readers.enter_context(archive.reading())
        waiting.start()
        asked.wait(DEADLINE_S)
        while archive._asking._value:
            assert waiting.is_alive()
        with pytest.raises(UnavailableError, match="got 3 requests at once"), archive.reading():
            pass
        assert not had.is_set()
    assert had.wait(DEADLINE_S)
    waiting.join(DEADLINE_S)
    with archive.reading():
        pass


def test_a_turn_that_does_not_come_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "WAIT_S", 0.05)
    archive = Past(Archive(tmp_path))
    with ExitStack() as readers:
        for _ in range(past.READERS):
            readers.enter_context(archive.reading())
        with pytest.raises(UnavailableError, match=r"got 2 readers for 0.05 s"), archive.reading():
            pass
    assert archive._asking._value == past.ASKING
