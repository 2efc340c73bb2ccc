"""Whether a service is healthy, as its container's check sees it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollplex.health import FILE, SILENT_S, STALE_S, Note, ServiceNote, judge, look, main, write

NOTE = Note(
    written_s=100.0,
    services=(
        ServiceNote(service="trainer[0:0]", state="busy", busy_with="train 0-3", heard_age_s=0.4),
        ServiceNote(service="prefix[0:0]", state="starting"),
        ServiceNote(service="rollout[0:0]", state="dead", heard_age_s=3.0),
        ServiceNote(service="input[0:0]", state="ready", heard_age_s=SILENT_S + 1),
    ),
)


@pytest.mark.parametrize(
    ("service", "now_s", "ok", "says"),
    [
        ("trainer[0:0]", 101.0, True, "trainer[0:0] is busy: train 0-3"),
        ("trainer[0:0]", 100.0 + STALE_S + 1, False, "the coordinator has written nothing for 21 s"),
        ("trainer[0:0]", 3.0, False, "has written nothing"),  # the machine was started again
        ("prefix[0:0]", 101.0, False, "prefix[0:0] is starting"),
        ("rollout[0:0]", 101.0, False, "rollout[0:0] is dead"),
        ("input[0:0]", 100.0, False, "input[0:0] has said nothing for 21 s"),
        ("trainer[0:1]", 101.0, False, "the coordinator knows no trainer[0:1]"),
    ],
)
def test_a_service_is_healthy_if_the_loop_turns_and_has_heard_of_it(
    service: str, now_s: float, ok: bool, says: str
) -> None:
    verdict = judge(NOTE, service, now_s)
    assert verdict.ok is ok
    assert says in verdict.text


def test_a_note_is_read_back_and_one_that_is_not_there_or_no_note_is_no_health(tmp_path: Path) -> None:
    assert "no coordinator has written" in look(tmp_path, "trainer[0:0]", 101.0).text
    write(tmp_path, NOTE)
    assert look(tmp_path, "trainer[0:0]", 101.0).ok
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    for damaged in (b"", b"[]", b'{"written_s": "soon", "services": []}'):
        (tmp_path / FILE).write_bytes(damaged)
        verdict = look(tmp_path, "trainer[0:0]", 101.0)
        assert not verdict.ok
        assert "cannot be read" in verdict.text


def test_the_command_says_it_in_a_line_and_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, Note(written_s=time.monotonic(), services=NOTE.services))
    assert main(["--run-dir", str(tmp_path), "--role", "trainer"]) == 0
    assert main(["--run-dir", str(tmp_path), "--role", "rollout", "--device", "0:0"]) == 1
    assert capsys.readouterr().out.splitlines() == ["trainer[0:0] is busy: train 0-3", "rollout[0:0] is dead"]


def test_the_command_imports_next_to_nothing() -> None:
    code = "import sys, rollplex.health; sys.exit(bool({'torch', 'numpy', 'zmq', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
