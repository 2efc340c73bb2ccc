"""`rollplex logs`: one service, all by time, and as they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollplex.cli import logs as module
from rollplex.cli.app import run
from rollplex.cli.logs import show
from rollplex.errors import ConfigError
from rollplex.protocol.claim import claim

Said = pytest.CaptureFixture[str]


def at(second: int, text: str) -> str:
    return f"2026-11-29 19:30:{second:02d},123 {text}\n"


@pytest.fixture
def run_dir(runs_dir: Path) -> Path:
    """An ended run with two logs."""
    claim(runs_dir / "a-1", "r1").release()
    logs = runs_dir / "a-1" / "logs"
    logs.mkdir()
    (logs / "trainer.log").write_text(at(1, "trainer INFO one") + at(4, "trainer ERROR four") + "  Traceback\n")
    (logs / "reward.log").write_text("printed early\n" + at(2, "reward INFO two") + "printed\n" + at(5, "reward INFO"))
    return runs_dir / "a-1"


def test_all_logs_come_by_time_each_line_with_its_service(run_dir: Path, capsys: Said) -> None:
    assert run(["logs"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "reward  | printed early",
        "trainer | 2026-11-29 19:30:01,123 trainer INFO one",
        "reward  | 2026-11-29 19:30:02,123 reward INFO two",
        "reward  | printed",
        "trainer | 2026-11-29 19:30:04,123 trainer ERROR four",
        "trainer |   Traceback",
        "reward  | 2026-11-29 19:30:05,123 reward INFO",
    ]


@pytest.mark.parametrize("name", ["trainer", "trainer[0:0]"])
def test_one_log_comes_as_it_is(run_dir: Path, capsys: Said, name: str) -> None:
    assert run(["logs", name, "--run", "a-1"]) == 0
    assert capsys.readouterr().out == (run_dir / "logs" / "trainer.log").read_text()


def test_of_a_role_on_several_devices_one_log_or_all_come(run_dir: Path, capsys: Said) -> None:
    for index in (0, 1):
        (run_dir / "logs" / f"prefix-{index}.log").write_text(at(index, f"of {index}"))
    assert run(["logs", "prefix[0:1]"]) == 0
    assert capsys.readouterr().out == at(1, "of 1")
    assert run(["logs", "prefix"]) == 0
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()] == ["0", "1"]


@pytest.mark.parametrize(("count", "last"), [(2, ["  Traceback", "reward INFO"]), (0, [])])
def test_only_the_last_lines_if_so_wanted(run_dir: Path, capsys: Said, count: int, last: list[str]) -> None:
    assert run(["logs", "--lines", str(count)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == count
    assert all(line.endswith(end) for line, end in zip(lines, last, strict=True))


def test_a_service_that_is_not_there_is_told_which_are(run_dir: Path, capsys: Said) -> None:
    assert run(["logs", "trainr"]) == 2
    err = capsys.readouterr().err
    assert "got trainr; needed one of reward, trainer. Did you mean trainer?" in err


def test_a_run_without_logs_says_nothing_and_a_service_of_it_is_an_error(runs_dir: Path, capsys: Said) -> None:
    claim(runs_dir / "a-1", "r1").release()
    assert run(["logs"]) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="whose services have been started here"):
        show(runs_dir / "a-1", "trainer", lines=1, follow=False, say=print)


def test_of_a_long_log_only_whole_lines_of_its_end_are_read(
    run_dir: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TAIL_BYTES", len(at(5, "reward INFO")) + 4)
    assert run(["logs", "reward"]) == 0
    assert capsys.readouterr().out == at(5, "reward INFO")


def follow(run_dir: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> list[str]:
    """What is said while `act` happens in the pauses."""
    said: list[str] = []
    count = iter(range(100))
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: act(next(count))))
    show(run_dir, None, lines=1, follow=True, say=said.append)
    return said


def test_following_tells_what_is_added_also_in_new_logs_until_the_run_ends(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = claim(run_dir, "r1")
    trainer, prefix = (run_dir / "logs" / f"{name}.log" for name in ("trainer", "prefix"))

    def act(count: int) -> None:
        if count == 0:
            with trainer.open("a") as file:
                file.write(at(7, "trainer INFO seven") + at(8, "trainer INFO half")[:-1])
            prefix.write_text(at(6, "prefix INFO six"))
        if count == 1:
            with trainer.open("a") as file:
                file.write(" a line\n")
            held.release()

    assert follow(run_dir, monkeypatch, act) == [
        "reward  | 2026-11-29 19:30:05,123 reward INFO",
        "prefix  | 2026-11-29 19:30:06,123 prefix INFO six",
        "trainer | 2026-11-29 19:30:07,123 trainer INFO seven",
        "trainer | 2026-11-29 19:30:08,123 trainer INFO half a line",
    ]


def test_following_a_run_that_has_ended_ends(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(count: int) -> None:
        raise AssertionError("it pauses")

    assert len(follow(run_dir, monkeypatch, never)) == 1
