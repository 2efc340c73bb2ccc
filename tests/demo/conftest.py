"""The quick demo's data, written once, and a run over it that has left nothing yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.demo.digits import HELD_OUT, write_digits
from rollplex.demo.recipe import QUICK_DIGITS
from support.demo import Played


@pytest.fixture(scope="session")
def quick_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "data"
    write_digits(folder, digits=QUICK_DIGITS)
    return folder


@pytest.fixture
def played(quick_data: Path, tmp_path: Path) -> Played:
    (tmp_path / "run").mkdir()
    return Played(tmp_path / "run", quick_data / HELD_OUT)
