"""One tiny model for all tests of conformance, and our services as a user names them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollplex.conformance.sitting import Limits


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by the first test that needs it."""
    return tmp_path_factory.mktemp("conformance") / "model"


PATIENT = Limits(start_s=100.0, received_s=10.0, answer_s=100.0, grace_s=15.0, alive_every_s=0.1)
"""What ours are held to, on cores that others use too."""
HASTY = Limits(start_s=100.0, received_s=1.0, answer_s=100.0, grace_s=2.0, alive_every_s=0.1)
"""For those that are meant to be late: they fail when it is over."""


NOT_WARM = {"leaves_a_child_with_its_stream"}
"""Started as processes of their own: a warm worker's end is that of its children too."""


def ours(role: str) -> list[str]:
    """The command of our own service."""
    return [sys.executable, "-m", f"rollplex_{role}"]


def broken(rule: str, role: str) -> list[str]:
    """Our own service, which breaks one rule (`warm_broken`)."""
    real = ["-B"] if rule in NOT_WARM else []
    return [sys.executable, *real, "-m", "warm_broken", rule, role]
