"""`rollplex runs`: every run of the runs folder, newest first."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec

from rollplex.cli.output import columns
from rollplex.cli.summary import Summary, summarize
from rollplex.cli.target import all_runs, written_at


def table(runs_dir: Path) -> str:
    """One line for each run."""
    rows: list[tuple[str, ...]] = [("name", "started", "state", "iterations", "reward", "newest checkpoint")]
    rows += [_row(found) for found in _summaries(runs_dir)]
    if len(rows) == 1:
        return f"{runs_dir}: no runs yet. Start one with `rollplex demo --quick` or `rollplex up CONFIG`."
    return columns(rows)


def as_json(runs_dir: Path) -> str:
    """The summaries as a JSON list, for programs."""
    return json.dumps(msgspec.to_builtins(_summaries(runs_dir)), indent=2)


def _summaries(runs_dir: Path) -> list[Summary]:
    newest = sorted(all_runs(runs_dir), key=written_at, reverse=True)
    return [summarize(run_dir, runs_dir) for run_dir in newest]


def _row(found: Summary) -> tuple[str, ...]:
    started = "" if found.started_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(found.started_s))
    wanted = f"/{found.iterations_wanted}" if (found.iterations_wanted or 0) >= found.iterations else ""
    checkpoint = "" if found.checkpoint is None else Path(found.checkpoint).name
    reward = "" if found.reward is None else f"{found.reward:.3f}"
    return found.name, started, found.state, f"{found.iterations}{wanted}", reward, checkpoint
