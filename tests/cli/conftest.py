"""A configuration file that can run, and stand-ins for the coordinator: small programs that record or stay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.config.yaml_text import dumps


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A valid configuration with the files that it names."""
    (tmp_path / "model").mkdir()
    for name in ("model/config.json", "rows.jsonl", "score.py"):
        (tmp_path / name).touch()
    file = tmp_path / "job.yaml"
    file.write_text(
        dumps(
            {
                "run": {"name": "job"},
                "model": {"path": "model"},
                "data": {"path": "rows.jsonl"},
                "rewards": {"functions": [{"function": "score.py:score"}]},
            }
        )
    )
    return file


@pytest.fixture
def runs_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs go that were given no directory; its path is short enough for sockets."""
    folder = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("ROLLPLEX_RUNS_DIR", str(folder))
    return folder


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """A command that runs Python text; `take(handler)` in it takes the signals over as a coordinator does."""

    def make(text: str) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(
            "import os, signal, sys, time\n"
            "def take(handler):\n"
            "    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
            "        signal.signal(number, handler)\n"
            "    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))\n" + text
        )
        return [sys.executable, str(file)]

    return make
