"""Servers for the tests of the HTTP API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.http_site import QUICK, TOKEN, FakeControl, Site


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site"), QUICK) as site:
        yield site


@pytest.fixture
def control(shared_site: Site, monkeypatch: pytest.MonkeyPatch) -> FakeControl:
    """The control of the module's server, as new."""
    monkeypatch.setattr("rollplex_coordinator.http.health.REMEMBERED_S", 0.0)
    shared_site.control.__init__()  # type: ignore[misc] # as new, at the place that the app knows
    return shared_site.control


@pytest.fixture
def client(shared_site: Site, control: FakeControl) -> Iterator[httpx.Client]:
    """With the token, and nothing else that a route needs."""
    with shared_site.client() as client:
        yield client


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Servers of a test's own."""
    with ExitStack() as stack:
        yield lambda streams=QUICK: stack.enter_context(Site(tmp_path, streams))


@pytest.fixture
def token() -> str:
    return TOKEN
