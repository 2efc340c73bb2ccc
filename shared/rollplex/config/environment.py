"""The only module that reads environment variables, and the one that makes the environment of child processes.

| variable | meaning |
|---|---|
| ROLLPLEX_RUNS_DIR | folder for runs that were not given one of their own; "runs" in the current folder by default |
| TERM, TTY_COMPATIBLE | lines cannot be drawn over where the first is empty or "dumb", or the second 0 |
| HOME | is written as ~ where paths are shown to be passed on |
| OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES | shown by `rollplex doctor` |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SHOWN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_DUMB = frozenset({"", "dumb", "unknown"})
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment says."""

    runs_dir: Path
    can_draw: bool
    """A terminal of this process, if it has one, can draw over its lines."""
    home: Path | None
    shown: Mapping[str, str]
    """Those that `rollplex doctor` shows, if they are set."""


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables of this process, or those given."""
    variables = os.environ if variables is None else variables
    return Environment(
        runs_dir=Path(variables.get("ROLLPLEX_RUNS_DIR") or "runs"),
        can_draw=variables.get("TERM", "") not in _DUMB and variables.get("TTY_COMPATIBLE") != "0",
        home=Path(home) if (home := variables.get("HOME", "")) else None,
        shown={name: variables[name] for name in _SHOWN if name in variables},
    )


def child_environment(*, threads: int, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process that we start: ours, with `threads` arithmetic threads, no network and no caches of
    our own choosing.

    OpenMP and the tokenizer read these once, before our code runs, so they cannot be set later.
    """
    child = dict(os.environ if variables is None else variables)
    child |= dict.fromkeys(_THREADS, str(threads))
    child |= {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    child |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
    return child
