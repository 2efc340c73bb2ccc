"""Lines of a run whose terminal takes no more of them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollplex_coordinator.saying import FILE, Terminal


class Pipe(io.StringIO):
    """Takes so many lines; then its reader is gone."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.left = lines

    def write(self, text: str) -> int:
        if self.left <= 0:
            raise BrokenPipeError(32, "Broken pipe")
        self.left -= 1
        return super().write(text)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    if made._nowhere is not None:
        made._nowhere.close()


def test_lines_go_to_the_standard_error_and_no_file_is_made(
    terminal: Terminal, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    terminal.keep_in(tmp_path / "logs")
    terminal.say("iteration 1/2")
    assert capsys.readouterr().err == "iteration 1/2\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("known_after", [0, 2, 3, 5])
def test_what_the_standard_error_does_not_take_any_more_is_kept_in_the_run(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known_after: int
) -> None:
    """The run may be known only after the terminal is gone."""
    pipe = Pipe(2)
    monkeypatch.setattr(sys, "stderr", pipe)
    for number in range(5):
        if number == known_after:
            terminal.keep_in(tmp_path / "logs")
        terminal.say(f"line {number}")
    if known_after == 5:
        terminal.keep_in(tmp_path / "logs")
    assert pipe.getvalue() == "line 0\nline 1\n"
    lines = (tmp_path / "logs" / FILE).read_text().splitlines()
    assert lines[0] == ("rollplex: the standard error takes no more lines ([Errno 32] Broken pipe); they go on here")
    assert lines[1:] == ["line 2", "line 3", "line 4"]
    print("what a library says", file=sys.stderr)


@pytest.mark.parametrize("closed", ["stream", "descriptor"])
def test_a_standard_error_that_was_closed_is_one_that_takes_no_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed: str
) -> None:
    read_fd, write_fd = os.pipe()
    stream = os.fdopen(write_fd, "w")
    if closed == "stream":
        stream.close()
    os.close(read_fd)
    monkeypatch.setattr(sys, "stderr", stream)
    terminal.keep_in(tmp_path)
    terminal.say("iteration 1/2")
    assert (tmp_path / FILE).read_text().endswith("iteration 1/2\n")
    monkeypatch.undo()
    if closed == "descriptor":
        with pytest.raises(BrokenPipeError):
            stream.close()


def test_where_nothing_can_be_kept_either_the_run_goes_on(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", Pipe(0))
    (tmp_path / "logs").write_text("a file")
    terminal.keep_in(tmp_path / "logs")
    terminal.say("iteration 1/2")
    assert (tmp_path / "logs").read_text() == "a file"
