"""A run of four iterations, and its trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.trace.run import write_trace
from support.journals import run_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run of four iterations that has ended."""
    run_of(tmp_path / "run", 4)
    return tmp_path / "run"


@pytest.fixture
def trace_file(run_dir: Path) -> Path:
    """Of that run."""
    write_trace(run_dir, steps=None, output=None, svg=None, say=lambda _: None)
    return run_dir / "trace.perfetto-trace"
