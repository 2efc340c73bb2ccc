"""Where the demo's run left its files, and what to try with them next: paths and commands as lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rollplex.demo.result import METRICS
from rollplex.demo.summary import entry


def file_lines(run_dir: Path, sheet: Path | None) -> list[str]:
    """The places of what a run left; only what is there.

    Args:
        sheet: the picture of scans with answers, if one was drawn.
    """
    places = [
        ("run directory", run_dir),
        ("newest checkpoint", newest_checkpoint(run_dir)),
        ("metrics", run_dir / METRICS),
        ("TensorBoard", run_dir / "tensorboard"),
        ("answers", sheet),
    ]
    lines = [entry(title, near(path)) for title, path in places if path is not None and path.exists()]
    return ["", "Files", "", *lines]


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of the most iterations, or None."""
    folders = (run_dir / "checkpoints").glob("step_*")
    steps = {int(path.name.removeprefix("step_")): path for path in folders if path.name[5:].isdigit()}
    return steps[max(steps)] if steps else None


def next_commands(config: Path, run: str) -> Iterator[tuple[list[str], str]]:
    """(arguments after `rollplex`, what they do): each can be typed as it is.

    Args:
        config: the demo's configuration.
        run: the run that was just made, as commands take it.
    """
    file = near(config)
    yield ["status", run], "how the run ended, and its newest checkpoint"
    yield ["trace", run, "--steps", "100:120"], "who worked when, for https://ui.perfetto.dev, and where the time went"
    yield ["up", file, "--set", "run.schedule=serial"], "the same run without overlap: the same weights, bit for bit"
    yield ["bench", "schedules", file], "what sharing and overlapping prefixes gain here, each alone (some minutes)"


def next_lines(config: Path, run: str, *, program: str) -> list[str]:
    """What to try next.

    Args:
        program: what the user types for `rollplex`.
    """
    lines = ["", "Next", ""]
    for arguments, what in next_commands(config, run):
        lines += [f"  {shlex.join([program, *arguments])}", f"      {what}"]
    return [*lines, "  your own data and reward", "      a JSONL file and a Python function: README.md"]


def near(path: Path) -> str:
    """Relative to the current folder where it lies inside: commands stay short."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
