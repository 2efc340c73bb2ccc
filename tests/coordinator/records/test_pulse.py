"""health.json, from the loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollplex.health import PERIOD_S, look
from rollplex.protocol.common import Role
from rollplex_coordinator.http.views import ServiceView
from rollplex_coordinator.records.pulse import Pulse

TRAINER = ServiceView(
    service="trainer[0:0]", role=Role.TRAINER, device="0:0", incarnation=1, pid=7, state="busy", busy_with="load"
)


class Asked:
    """Counts how often the services are looked at, and is the clock."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.times = 0

    def clock(self) -> float:
        return self.now_s

    def services(self) -> Sequence[ServiceView]:
        self.times += 1
        return (TRAINER,)


def test_a_note_is_written_once_per_period_however_often_the_loop_turns(tmp_path: Path) -> None:
    asked = Asked()
    pulse = Pulse(tmp_path, asked.clock)
    for _ in range(5):
        pulse.turn(asked.services)
    assert asked.times == 1
    assert look(tmp_path, "trainer[0:0]", asked.now_s + 1).text == "trainer[0:0] is busy: load"
    asked.now_s += PERIOD_S
    pulse.turn(asked.services)
    assert asked.times == 2


def test_a_disk_that_refuses_is_told_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked()
    pulse = Pulse(tmp_path / "gone", asked.clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pulse.turn(asked.services)
            asked.now_s += PERIOD_S
    assert len(caplog.records) == 1
    assert "Health checks" in caplog.text
