"""`rollplex demo`: writes the digits demo, runs it, says what came out. Knows the run only by the files it leaves.

What is said is made in `rollplex.demo`: opening and end in `summary`, scans with answers in `answers`, `picture` and
`sheet`, files and commands in `guide`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rollplex.cli.child import run_child
from rollplex.cli.demo_check import CHECK, VerifyCommand, check_exactness, default_command
from rollplex.cli.start import Prepared, coordinator_command, fresh, prepare, timestamp
from rollplex.cli.target import name_of
from rollplex.config.environment import child_environment
from rollplex.demo import guide, summary
from rollplex.demo.answers import choose, read_answers
from rollplex.demo.digits import HELD_OUT
from rollplex.demo.picture import Screen, draw
from rollplex.demo.recipe import EVAL_HELD_OUT, DemoFolder, write_demo
from rollplex.demo.result import Measured, Result, read_result
from rollplex.demo.sheet import write_sheet
from rollplex.errors import ConfigError, RollplexError
from rollplex.protocol.claim import holder_of
from rollplex.protocol.rundir import RunDir, check_path

EXIT_FAILED = 1
PLAIN_WIDTH = 100
"""Columns of an output that is no terminal."""
SHOWN_SCANS, SHOWN_MISTAKES = 8, 2
Say = Callable[[str], None]


def run_demo(
    folder: Path | None,
    *,
    quick: bool,
    runs_dir: Path,
    say: Say,
    screen: Screen,
    command: Callable[[Prepared], list[str]] = lambda prepared: coordinator_command(prepared, die_with_parent=True),
    verify_command: VerifyCommand = default_command,
) -> int:
    """Write the demo into `folder` (None: a new one in `runs_dir`), run it, and say the result; the exit code.

    The code is the coordinator's; 1 if the run is complete but a promise of the demo is broken.

    Args:
        say: gets each line of output.
        screen: what the output can show.
        command: how the coordinator is started.
        verify_command: how that of the verification at the end is started.

    Raises:
        ConfigError: another demo is going on in the folder, or the folder cannot hold a run directory.
        RollplexError: the demo cannot be written or started, or the coordinator was killed.
        OSError: the folder cannot be written.
    """
    folder = (folder or fresh(runs_dir, f"demo-{timestamp()}")).absolute()
    run_dir = fresh(folder, "run")
    for place in (run_dir, fresh(folder, CHECK)):
        check_path(RunDir(place))  # before a thousand files are written
    _refuse_if_live(folder)
    _say_all(say, summary.headline())
    written = write_demo(folder, quick=quick)
    prepared = prepare(written.config, [], run_dir, runs_dir)
    config = prepared.config
    _say_all(say, summary.opening(written, config, quick=quick))
    start_s = time.monotonic()
    grace_s = 2.0 * config.deadlines.leave_s + 5.0
    environment = child_environment(threads=config.run.threads)
    try:
        code = run_child(command(prepared), grace_s=grace_s, environment=environment)
    except RollplexError:
        _tell(written, prepared, say, screen, seconds=time.monotonic() - start_s)
        raise
    result = _tell(written, prepared, say, screen, seconds=time.monotonic() - start_s)
    if code != 0 or not result.is_complete:
        return code
    run = guide.near(Path(name_of(run_dir, runs_dir)))
    _say_all(say, guide.next_lines(written.config, run, program=_program()))
    code, report = check_exactness(written.config, run_dir, say=say, command=verify_command)
    is_kept, lines = summary.verdict(result, written.promise, is_exact=report.passed if report else None)
    _say_all(say, lines)
    return code if is_kept else EXIT_FAILED


def screen_of_stdout() -> Screen:
    """What the standard output can show."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    plain = Screen(width=PLAIN_WIDTH, is_unicode=encoding == "utf8", has_colours=False)
    if not sys.stdout.isatty():
        return plain
    from rich.console import Console  # noqa: PLC0415 - slow to import

    console = Console()
    has_colours = not console.no_color and console.color_system in {"256", "truecolor"}
    return replace(plain, width=console.width, has_colours=has_colours)


def _tell(written: DemoFolder, prepared: Prepared, say: Say, screen: Screen, *, seconds: float) -> Result:
    """Say what there is; and what was read of it."""
    result = read_result(prepared.run_dir, wanted=prepared.config.run.iterations)
    _say_all(say, summary.result_lines(result, written))
    sheet = _show_answers(result.held_out[-1], written, prepared.run_dir, say, screen) if result.held_out else None
    _say_all(say, summary.time_lines(prepared.run_dir, seconds=seconds))
    _say_all(say, guide.file_lines(prepared.run_dir, sheet))
    return result


def _show_answers(measured: Measured, written: DemoFolder, run_dir: Path, say: Say, screen: Screen) -> Path | None:
    """Scans with answers, on the screen and as a picture file beside the run directory; the file."""
    data = written.config.parent / "data" / HELD_OUT
    answers = read_answers(run_dir, data, name=EVAL_HELD_OUT, step=measured.step)
    if not answers:
        say("  (no scans are shown: the run kept no answers)")
        return None
    shown = choose(answers, count=min(SHOWN_SCANS, screen.num_scans), wrong=SHOWN_MISTAKES)
    mistakes, among = (sum(not answer.is_right for answer in some) for some in (answers, shown))
    say("")
    say(f"  {len(shown)} of these scans, {among} of the {mistakes} mistakes among them; the digit that was answered:")
    say("")
    _say_all(say, draw(shown, screen))
    sheet = run_dir.parent / f"answers{run_dir.name.removeprefix('run')}.png"
    title = f"Held-out scans after {measured.step} iterations, {measured.num_right} of {measured.count} right"
    write_sheet(sheet, answers, title=title)
    return sheet


def _refuse_if_live(folder: Path) -> None:
    """Its data must not be replaced while a run reads them.

    Raises:
        ConfigError: a run in the folder is going on.
    """
    for run_dir in sorted(folder.glob("run*")):
        if holder := holder_of(run_dir):
            raise ConfigError(
                "A demo is running in this folder",
                got=f"pid {holder.pid} on {holder.host}, run {holder.run_id}",
                needed="a folder of its own for each demo at a time",
                do="Wait for its end, or choose another --dir.",
                where=str(folder),
            )


def _program() -> str:
    """What the user types for `rollplex`: the command beside this Python, by path if the shell would not find it."""
    ours = Path(sys.executable).parent / "rollplex"
    found = shutil.which("rollplex")
    if not ours.is_file() or (found is not None and Path(found).samefile(ours)):
        return "rollplex"
    return str(ours.relative_to(Path.cwd())) if ours.is_relative_to(Path.cwd()) else str(ours)


def _say_all(say: Say, lines: list[str]) -> None:
    for line in lines:
        say(line)
