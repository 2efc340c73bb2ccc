"""`rollplex demo`: writes the digits demo, runs it, says what came out. Knows the run only by the files it leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

from rollplex.cli.child import run_child
from rollplex.cli.start import Prepared, coordinator_command, fresh, prepare, timestamp
from rollplex.config.environment import child_environment
from rollplex.demo.recipe import ACCURACY, EVAL_GREY, EVAL_HELD_OUT, DemoFolder, write_demo
from rollplex.errors import DataError
from rollplex.protocol.rundir import RunDir, check_path

Row = Mapping[str, object]


def run_demo(
    folder: Path | None,
    *,
    quick: bool,
    runs_dir: Path,
    say: Callable[[str], None],
    command: Callable[[Prepared], list[str]] = lambda prepared: coordinator_command(prepared, die_with_parent=True),
) -> int:
    """Write the demo into `folder` (None: a new one in `runs_dir`), run it, and say the result; the exit code.

    Args:
        say: gets each line of output.
        command: how the coordinator is started.

    Raises:
        RollplexError: the demo cannot be written or started, or the coordinator was killed.
        OSError: the folder cannot be written.
    """
    folder = (folder or fresh(runs_dir, f"demo-{timestamp()}")).absolute()
    run_dir = fresh(folder, "run")
    check_path(RunDir(run_dir))  # before a thousand files are written
    written = write_demo(folder, quick=quick)
    names = ", ".join(str(digit) for digit in written.digits)
    say(f"{written.rows.num_train} scans of the digits {names} to learn from, {written.rows.num_held_out} held out")
    say(f"folder {folder}")
    prepared = prepare(written.config, [], run_dir, runs_dir)
    config = prepared.config
    start_s = time.monotonic()
    grace_s = 2.0 * config.deadlines.leave_s + 5.0
    code = run_child(command(prepared), grace_s=grace_s, environment=child_environment(threads=config.run.threads))
    for line in summary(written, prepared, seconds=time.monotonic() - start_s):
        say(line)
    return code


def summary(written: DemoFolder, prepared: Prepared, *, seconds: float) -> list[str]:
    """The result in a few lines, from metrics.jsonl and eval.jsonl of the run directory.

    Raises:
        DataError: a line of these files is not a JSON object.
    """
    run_dir, wanted = prepared.run_dir, prepared.config.run.iterations
    done = sum("step" in row for row in _rows(run_dir / "metrics.jsonl"))
    rows = list(_rows(run_dir / "eval.jsonl"))
    held_out = [row for row in rows if row.get("name") == EVAL_HELD_OUT]
    grey = [row for row in rows if row.get("name") == EVAL_GREY]
    early = "" if done >= wanted else f" of {wanted}; it ended early"
    lines = [""]
    if held_out:
        lines.append(_accuracy("held-out accuracy", held_out, f"blind guessing {written.chance:.3f}"))
    if grey:
        lines.append(_accuracy("on grey pictures", grey, "the same rows, nothing to see"))
    if not rows:
        lines.append("no evaluation was made")
    lines.append(f"{'iterations':<18}  {done}{early}")
    lines.append(f"{'seconds':<18}  {seconds:.0f}")
    lines.append(f"{'run directory':<18}  {run_dir}")
    return lines


def _accuracy(title: str, rows: list[Row], note: str) -> str:
    """One line: the first and the last evaluation of one name, or the only one."""
    first, last = rows[0], rows[-1]
    values = f"{_number(last, ACCURACY):.3f} after {_number(last, 'step'):.0f} iterations"
    if last is not first:
        values = f"{_number(first, ACCURACY):.3f} after {_number(first, 'step'):.0f}, {values}"
    return f"{title:<18}  {values} ({_number(last, 'count'):.0f} scans; {note})"


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float):
        raise DataError("An evaluation lacks a number", got=repr(value), needed=key, where="eval.jsonl")
    return float(value)


def _rows(file: Path) -> Iterator[Row]:
    """The JSON objects of a file; none if the run did not get so far. A last line cut short is left out."""
    if not file.is_file():
        return
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError("A line is not JSON", got=str(error), where=f"{file}:{number}") from None
        if not isinstance(row, dict):
            raise DataError("A line is not a JSON object", got=line.strip()[:80], where=f"{file}:{number}")
        yield cast("Row", row)
