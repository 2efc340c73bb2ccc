"""A tracker's process from outside: whatever it does, the run goes on."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollplex_coordinator.records.trackers.tracker import Tracker, close_all

DEADLINE_S = 30.0
READY = "import sys, json; print(json.dumps({'state': 'ready', 'detail': 'here'}), flush=True)\n"
KEEPS = READY + "open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())\n"
HANGS = READY + "import time\nwhile True: time.sleep(1)\n"
DIES = READY + "sys.stdin.readline(); sys.exit(7)\n"
FAILS = 'print(\'noise\'); print(\'{"state": "failed", "detail": "no account"}\', flush=True)\n'
Make = Callable[..., Tracker]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """make(code): a tracker whose process runs it."""
    made: list[Tracker] = []

    def start(code: str, max_rows: int = 10) -> Tracker:
        command = [sys.executable, "-S", "-c", code, str(tmp_path / "rows")]
        tracker = Tracker(
            "some", command, {"backend": "some"}, tmp_path / "logs/some.log", environment=os.environ, max_rows=max_rows
        )
        made.append(tracker)
        return tracker

    yield start
    for tracker in made:
        tracker.kill()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_rows_arrive_in_order_after_the_beginning_and_the_end_is_waited_for(make: Make, tmp_path: Path) -> None:
    tracker = make(KEEPS)
    until(lambda: tracker.state == "ready")
    assert tracker.detail == "here"
    for step in range(3):
        tracker.put(step, {"reward": step / 2})
    tracker.put(3, {"reward": 1.0}, "held-out")
    close_all([tracker], DEADLINE_S)
    lines = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert lines[0] == {"backend": "some"}
    assert [line["step"] for line in lines[1:]] == [0, 1, 2, 3]
    assert lines[-1] == {"step": 3, "evaluation": "held-out", "values": {"reward": 1.0}}
    assert tracker.state == "ready"
    assert tracker.dropped_rows == 0


@pytest.mark.parametrize(("code", "detail"), [(DIES, "exit code 7"), (FAILS, "no account")])
def test_a_tracker_that_fails_is_told_once_and_asked_nothing_more(
    make: Make, caplog: pytest.LogCaptureFixture, code: str, detail: str
) -> None:
    with caplog.at_level(logging.WARNING):
        tracker = make(code)
        until(lambda: tracker.state == "failed")
        for step in range(100):
            tracker.put(step, {"reward": 1.0})
        close_all([tracker], DEADLINE_S)
    assert detail in tracker.detail
    assert len(caplog.records) == 1
    assert "some is left out from here on" in caplog.text


def test_a_program_that_is_not_there_is_told_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker("some", ["/nowhere/program"], {}, tmp_path / "some.log", environment={})
    tracker.put(0, {})
    close_all([tracker], 0.0)
    assert tracker.state == "failed"
    assert "No such file" in caplog.text


def test_a_tracker_that_hangs_loses_rows_but_holds_up_nobody_and_is_killed_in_the_end(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = make(HANGS, max_rows=5)
    until(lambda: tracker.state == "ready")
    large = {f"metric/{index}": 1.0 for index in range(2_000)}  # a pipe holds few of these
    for step in range(50):
        tracker.put(step, large)
    assert tracker.dropped_rows > 0
    assert sum("does not keep up" in record.message for record in caplog.records) == 1
    close_all([tracker], 0.2)
    assert tracker._child is not None
    assert tracker._child.poll() is not None


def test_what_a_tracker_s_package_has_started_ends_with_it(make: Make, tmp_path: Path) -> None:
    sleeps = "[sys.executable, '-S', '-c', 'import time; time.sleep(300)']"
    tracker = make(
        f"import subprocess, sys\nopen(sys.argv[1], 'w').write(str(subprocess.Popen({sleeps}).pid))\n" + HANGS
    )
    until(lambda: tracker.state == "ready")
    pid = int((tmp_path / "rows").read_text())
    assert Path(f"/proc/{pid}").exists()
    close_all([tracker], 0.2)
    until(lambda: not runs(pid))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_child_that_ends_in_the_middle_of_a_row_leaves_no_thread_with_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    tracker = make(HANGS, max_rows=1_000)
    until(lambda: tracker.state == "ready")
    for step in range(50):
        tracker.put(step, {f"metric/{index}": 1.0 for index in range(2_000)})
    until(lambda: tracker._rows.qsize() < 50)
    tracker.kill()
    tracker._feeder.join(DEADLINE_S)
    assert not tracker._feeder.is_alive()
    assert raised == []


def test_a_child_that_says_no_more_and_stays_is_left_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplex_coordinator.records.trackers.tracker.ENDING_S", 0.2)
    tracker = make("import os, time\nos.close(1)\ntime.sleep(300)\n")
    until(lambda: tracker.state == "failed")
    assert "did not end within 0.2 s" in tracker.detail
