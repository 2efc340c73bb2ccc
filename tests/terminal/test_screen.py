"""The table on a pseudo-terminal: redrawn in place, lines above it, nothing left behind."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest

from rollplex.terminal.screen import EVERY_S, Screen, can_draw
from support.terminals import Terminal, lines_of
from support.views import FULL


@pytest.fixture(autouse=True)
def _able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def test_the_table_is_redrawn_in_place_and_lines_appear_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal() as terminal:
        monkeypatch.setattr(sys, "stderr", terminal.stream)
        screen = Screen(terminal.stream)
        for done in (1, 2):
            screen.show(replace(FULL, done=done))
            sys.stderr.write(f"a line after {done}\n")
        screen.show(replace(FULL, done=3))
        screen.stop()
        assert sys.stderr is terminal.stream
        sys.stderr.write("the end\n")
        written = terminal.close()
    lines = [line for line in lines_of(written) if line]
    assert lines[:3] == ["a line after 1", "a line after 2", "digits-1"]
    assert [line.split()[1] for line in lines if line.startswith("iterations")] == ["3/400"]
    assert lines[-1] == "the end"
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1


def test_without_colours_if_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with Terminal() as terminal:
        screen = Screen(terminal.stream)
        screen.show(FULL)
        screen.stop()
        written = terminal.close()
    assert "ROLLOUT" in written
    assert "\x1b[36m" not in written
    assert "36m" not in written


def test_a_terminal_can_be_drawn_on_unless_it_is_dumb_and_a_file_never(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal() as terminal:
        assert can_draw(terminal.stream)
        monkeypatch.setenv("TERM", "dumb")
        assert not can_draw(terminal.stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not can_draw(io.StringIO())


def test_it_is_drawn_at_most_four_times_a_second_and_less_often_where_drawing_is_slow() -> None:
    now_s, drawing_s = [100.0], [0.001]

    def clock() -> float:
        now_s[0] += drawing_s[0]
        return now_s[0]

    with Terminal() as terminal:
        screen = Screen(terminal.stream, clock)
        assert screen.due()
        screen.show(FULL)
        shown_s = now_s[0]
        while not screen.due():
            pass
        assert now_s[0] - shown_s == pytest.approx(EVERY_S, abs=0.01)
        drawing_s[0] = 0.02
        screen.show(FULL)
        shown_s = now_s[0]
        while not screen.due():
            pass
        assert now_s[0] - shown_s == pytest.approx(1.0, abs=0.05)
        screen.stop()


def test_after_the_stop_nothing_is_due_or_drawn_and_a_second_stop_does_nothing() -> None:
    with Terminal() as terminal:
        screen = Screen(terminal.stream)
        drawn = [screen.drawn]
        screen.show(FULL)
        drawn.append(screen.drawn)
        screen.stop()
        drawn.append(screen.drawn)
        assert not screen.due()
        screen.show(replace(FULL, done=222))
        screen.stop()
        assert drawn == [False, True, False]
        assert "222/400" not in terminal.close()


def test_a_screen_that_was_never_drawn_on_leaves_no_trace() -> None:
    with Terminal() as terminal:
        Screen(terminal.stream).stop()
        assert terminal.close() == ""
