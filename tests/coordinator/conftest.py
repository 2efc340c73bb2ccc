"""A tiny model folder, and cores of a coordinator over workers without processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollplex.presets import TINY, write_preset
from rollplex.protocol.common import Role
from support.core import AMPLE, Core, make_config
from support.sockets import Clock, Site, open_hub


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(TINY.name, tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_core(model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Core]]:
    """make_core(seed=1, budget_bytes=..., run={...}, ...): a core over `make_config` with these sections."""
    with ExitStack() as stack:

        def make(seed: int = 0, budget_bytes: int | None = None, **sections: Any) -> Core:
            budget = AMPLE if budget_bytes is None else budget_bytes
            core = Core(make_config(model_folder, **sections), tmp_path, random.Random(seed), budget)
            return stack.enter_context(core)

        yield make


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A link over real sockets that expects every role."""
    run_dir = tmp_path / "run"
    with open_hub(run_dir, Role) as hub, Site(run_dir, hub, Clock()) as site:
        yield site
