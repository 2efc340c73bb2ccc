"""A coordinator's sockets in this process, for workers that run in threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollplex.memory.segment import backend
from rollplex.protocol.claim import Claim, claim
from rollplex.protocol.common import Device, Role
from rollplex.protocol.handshake import Welcome
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.processes.hub import Hub


@pytest.fixture
def claimed(tmp_path: Path) -> Iterator[Claim]:
    with claim(tmp_path / "run", "test-run") as held:
        yield held


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder(backend("host"))
    yield holder
    holder.close_all()


@pytest.fixture
def hub(claimed: Claim, holder: Holder) -> Iterator[Hub]:
    welcome = Welcome(run_id="test-run", alive_every_s=0.1, received_within_s=5.0, grace_s=2.0)
    hub = Hub(claimed.run_dir, claimed.secret, welcome, holder)
    hub.expect(Role.ROLLOUT, Device(), 1, exact=True)
    yield hub
    hub.close()
