"""The demo's opening and its end in words. Reads what the run left; draws and runs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rollplex.config import Config
from rollplex.demo.recipe import ALL_DIGITS, DemoFolder, Promise
from rollplex.demo.records import number, read_rows
from rollplex.demo.result import METRICS, Measured, Result, keeps_grey, keeps_held_out
from rollplex.presets import TINY
from rollplex.trace.source import Source
from rollplex.trace.startup import stages
from rollplex.trace.where import iteration_table

JOURNAL: Final = "journal.sqlite"
PREFIX_IN_WINDOW: Final = "time/prefix_in_window"
_TITLE: Final = 19
"""Columns of what stands before a value."""


def entry(title: str, value: str) -> str:
    """One line of a section."""
    return f"  {title:<{_TITLE}} {value}"


def headline() -> list[str]:
    """Before anything is written."""
    return ["Rollplex demo: a vision-language model learns to name handwritten digits, from rewards alone.", ""]


def opening(written: DemoFolder, config: Config, *, quick: bool) -> list[str]:
    """What will happen, with what, and how long it takes."""
    digits = "0 to 9" if written.digits == ALL_DIGITS else ", ".join(map(str, written.digits))
    prompts, samples = config.data.prompts_per_iteration, config.rollout.group_size
    rows = written.rows
    how_long = "about a minute" if quick else "two to three minutes"
    return [
        entry("model", f"a tiny Qwen2.5-VL, {TINY.num_parameters:,} parameters, random weights"),
        entry("data", f"scans of the digits {digits}, 8 x 8 pixels each"),
        entry("", f"{rows.num_train:,} to learn from, {rows.num_held_out} held out"),
        entry("each iteration", f"{prompts} scans, {samples} answers to each, one update"),
        entry("", "reward 1 for the right digit, 0.2 for a wrong one, 0 for anything else"),
        entry("steps", f"start a node; {config.run.iterations:,} iterations; evaluate on held-out scans before,"),
        entry("", "meanwhile and after, and on grey pictures at the end (a control);"),
        entry("", "check the split computation against the unsplit one"),
        entry("time", f"{how_long} on two cores; Ctrl-C ends it at any time"),
        entry("needs", "no GPU, no network"),
        entry("folder", str(written.config.parent)),
        "",
    ]


def result_lines(result: Result, written: DemoFolder) -> list[str]:
    """Accuracy before and after, and the control."""
    lines = ["", "Result", ""]
    if result.held_out:
        first, last = result.held_out[0], result.held_out[-1]
        value = f"{last.accuracy:.3f} after {last.step} iterations"
        if last is not first:
            before = "before" if first.step == 0 else f"after {first.step}"
            value = f"{first.accuracy:.3f} {before}, {value}"
        lines.append(entry("held-out accuracy", f"{value} ({last.count} scans; blind guessing {written.chance:.3f})"))
    if result.grey:
        lines.append(entry("on grey pictures", _control(result.grey[-1], keeps_grey(result, written.promise))))
    if not result.held_out and not result.grey:
        lines.append(entry("accuracy", "no evaluation was made"))
    if result.done < result.wanted:
        lines.append(entry("iterations", f"{result.done} of {result.wanted}; it ended early"))
    return lines


def time_lines(run_dir: Path, *, seconds: float) -> list[str]:
    """How long the run took, how much of the prefix work is hidden, and where an iteration's time goes.

    Raises:
        DataError: a line of metrics.jsonl is not a JSON object.
        JournalError: the journal cannot be read.
    """
    rows, journal = list(read_rows(run_dir / METRICS)), run_dir / JOURNAL
    whole, table = f"{seconds:.0f} s, start and evaluations included", list[str]()
    if rows and journal.is_file():
        with Source(journal) as source:
            start = stages(source.records())[-1]
        whole += f"; {start.end_s - start.start_s:.1f} s to the first iteration"
        table = ["", *(f"  {line}" for line in iteration_table(journal))]
    lines = ["", "Time", "", entry("whole run", whole)]
    hidden = [number(row, PREFIX_IN_WINDOW, where=METRICS) for row in rows if PREFIX_IN_WINDOW in row]
    if hidden:
        share = f"{statistics.median(hidden):.0%} of the prefix work (median) was done while answers were decoded"
        lines.append(entry("hidden", share))
    return lines + table


def verdict(result: Result, promise: Promise, *, is_exact: bool | None) -> tuple[bool, list[str]]:
    """Whether a complete run broke nothing of what the demo promises, and that in words.

    Args:
        is_exact: whether split and unsplit computation agree; None: the check did not come to its end.
    """
    held_out, grey = keeps_held_out(result, promise), keeps_grey(result, promise)
    exactness = {True: "agree", False: "differ", None: "were not compared"}[is_exact]
    parts = [
        (held_out, f"held-out accuracy {_last(result.held_out)} (promised: at least {promise.held_out:.2f})"),
        (grey, f"grey pictures {_last(result.grey)} (promised: below {promise.grey:.2f})"),
        (is_exact, f"split and unsplit computation {exactness}"),
    ]
    marks = {True: "PASS", False: "FAIL", None: "----"}
    lines = ["", *(f"{marks[passed]}  {text}" for passed, text in parts)]
    is_kept = all(passed is not False for passed, _ in parts)
    if not is_kept:
        lines += [
            "",
            "The run is complete, but a promise of the demo is broken. Other library versions and processors give",
            "other numbers; constraints/host.txt has the versions that were seen to keep the promise.",
        ]
    return is_kept, lines


def _control(measured: Measured, is_kept: bool) -> str:
    story = "stays at chance, as it must" if is_kept else "above chance, which must not be"
    return f"{measured.accuracy:.3f}: {story} (a control: the same questions, nothing to see)"


def _last(evaluations: Sequence[Measured]) -> str:
    return f"{evaluations[-1].accuracy:.3f}" if evaluations else "not measured"
