"""Keeps what an earlier run left in a run directory: each run begins with empty records, and nothing is overwritten.

RUN/attempts/1/{journal.sqlite, metrics.jsonl, eval.jsonl, completions.jsonl, samples, tensorboard, wandb, trackio,
                mlflow, logs, checkpoints, gradients}
"""

from __future__ import annotations

from pathlib import Path

from rollplex.checkpoint.folder import CHECKPOINTS
from rollplex.layout.parameters import GRADIENTS

RECORDS = (
    "journal.sqlite",
    "metrics.jsonl",
    "eval.jsonl",
    "completions.jsonl",
    "samples",
    "tensorboard",
    "wandb",
    "trackio",
    "mlflow",
    "logs",
    CHECKPOINTS,
    GRADIENTS,
    "http.json",
)
"""What a run writes. SQLite's companions of the journal go with it."""


def set_aside(run_dir: Path) -> Path | None:
    """Move the records of an earlier run into a numbered folder; returns it, or None if there are none.

    Only the holder of the run directory's lock may do this.

    Raises:
        OSError: something cannot be moved.
    """
    names = [path.name for name in RECORDS for path in sorted(run_dir.glob(f"{name}*"))]
    if not names:
        return None
    folder = new_attempt(run_dir)
    for name in names:
        (run_dir / name).rename(folder / name)
    return folder


def new_attempt(run_dir: Path) -> Path:
    """Make the next numbered folder.

    Raises:
        OSError: it cannot be made.
    """
    attempts = run_dir / "attempts"
    attempts.mkdir(exist_ok=True)
    numbers = [int(path.name) for path in attempts.iterdir() if path.name.isdigit()]
    folder = attempts / str(max(numbers, default=0) + 1)
    folder.mkdir()
    return folder
