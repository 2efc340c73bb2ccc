"""A worker that has not joined yet, and whose starter ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollplex.worker.starter import VARIABLE, Starter


def test_it_is_gone_when_it_has_ended_and_not_before() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        starter = Starter({VARIABLE: str(process.pid)})
        assert not starter.look()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)
        assert starter.look()
        assert starter.look()
        assert starter.gone
    starter.close()


def test_one_that_has_ended_before_it_is_looked_for_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    assert Starter({VARIABLE: str(process.pid)}).look()


@pytest.mark.parametrize("variables", [{}, {VARIABLE: ""}, {VARIABLE: "nobody"}])
def test_nobody_is_never_gone(variables: dict[str, str]) -> None:
    starter = Starter(variables)
    assert not starter.look()
    starter.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_no_descriptor_stays() -> None:
    before = open_files()
    starter = Starter({VARIABLE: str(os.getpid())})
    assert not starter.look()
    starter.close()
    starter.close()
    assert open_files() == before
