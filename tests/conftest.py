"""What every test gets: one torch thread, no way to reach a model hub, and workers that start warm."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _warm_workers() -> Iterator[None]:
    """Workers are forked from a process that has torch already (support.warm)."""
    from support.warm import warm_process

    with warm_process():
        yield


SLOW = (
    "tests/bench/test_gradients.py::test_on_a_host",
    "tests/bench/test_schedules.py::test_two_",
    "tests/e2e/test_replay.py",
    "tests/model/test_parallel.py",
    "tests/cli/test_plan.py::test_the_document_says",
    "tests/tune/test_share.py::test_a_dry_run",
    "tests/tune/test_share.py::test_a_row_that_fails",
    "tests/tune/test_share.py::test_every_candidate",
    "tests/tune/test_share.py::test_rows_can_be_measured",
    "tests/tune/test_share.py::test_the_same_command",
)
"""Whole nodes of benches and tools, and groups of ranks: `make slow`. A landing has twenty minutes on two cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="only the tests that `make test` leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests apart; tests marked `gpu` skip where there is no CUDA device."""
    chosen = {item for item in items if item.nodeid.startswith(SLOW)}
    asked = bool(config.getoption("--slow"))
    left_out = {item for item in items if (item in chosen) != asked} if len(items) > len(chosen) or asked else set()
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
