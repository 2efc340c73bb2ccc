"""The watch over a GPU's memory: peaks between edges, what is journalled, what is told and what ends the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from rollplex.errors import BudgetError
from rollplex.journal.events import MemoryObserved
from rollplex.journal.phases import Phase
from rollplex.nvml import Gpu
from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.observed import Leased
from rollplex_coordinator.memory import observer as module
from rollplex_coordinator.memory.observer import Observer
from support.fake_nvml import FakeNvml

GIB = 2**30
DEADLINE_S = 10.0


class Watch:
    """An observer over numbers that a test sets."""

    def __init__(self, budget_bytes: int = 100 * GIB) -> None:
        self.nvml = FakeNvml(total=100 * GIB, used=GIB)
        self.leased = Leased()
        self.told: list[MemoryObserved] = []
        self.names: Mapping[int, str] = {7: "prefix", 8: "rollout"}
        self.observer = Observer(
            Gpu(self.nvml, 0),
            Device(),
            baseline_bytes=GIB,
            budget_bytes=budget_bytes,
            leased=lambda: self.leased,
            name_of=lambda pid: self.names.get(pid, ""),
            tell=self.told.append,
        )

    def settle(self, used: int) -> None:
        """Loaded, with so much used."""
        self.nvml.used = used
        self.observer.loaded()
        self.observer.enter(Phase.IDLE, None, {})
        self.told.clear()

    def sampled(self) -> None:
        """Wait until the sampler has looked at the present numbers."""
        end = time.monotonic() + DEADLINE_S
        while (peak := self.observer._peak) is None or peak.used_bytes < self.nvml.used:
            assert time.monotonic() < end
            time.sleep(0.001)


@pytest.fixture
def watch() -> Iterator[Callable[..., Watch]]:
    made: list[Watch] = []

    def make(**changes: Any) -> Watch:
        made.append(Watch(**changes))
        return made[-1]

    yield make
    for each in made:
        each.observer.close()


def test_a_peak_between_two_edges_is_journalled_with_the_books_of_that_moment(watch: Callable[..., Watch]) -> None:
    w = watch()
    w.settle(used=6 * GIB)
    assert w.observer.overhead_bytes == 5 * GIB
    w.observer.start()
    w.observer.enter(Phase.ROLLOUT, 3, {})
    w.leased = Leased(segments_bytes=10 * GIB, private=(("prefix", 4 * GIB),))
    w.nvml.used = 21 * GIB
    w.sampled()
    w.leased = Leased()
    w.nvml.used = 6 * GIB
    w.told.clear()
    w.observer.enter(Phase.SCORE, 3, {"prefix": 3 * GIB})
    assert w.told == [
        MemoryObserved(
            device=Device(),
            phase="ROLLOUT",
            step=3,
            used_bytes=20 * GIB,
            segments_bytes=10 * GIB,
            private_bytes={"prefix": 4 * GIB},
            held_bytes={"prefix": 3 * GIB},
            overhead_bytes=5 * GIB,
            difference_bytes=GIB,
        )
    ]
    w.observer.enter(Phase.TRAIN, 3, {})
    assert w.told[-1].used_bytes == 5 * GIB, "a peak belongs to one phase"


def test_without_a_sample_the_edge_itself_is_looked_at(watch: Callable[..., Watch]) -> None:
    w = watch()
    w.observer.enter(Phase.IDLE, None, {})
    assert [(event.phase, event.used_bytes, event.overhead_bytes) for event in w.told] == [("LOAD", 0, None)]


def test_a_large_difference_is_told_once_for_each_phase_and_direction(
    watch: Callable[..., Watch], caplog: pytest.LogCaptureFixture
) -> None:
    w = watch()
    w.settle(used=6 * GIB)
    for used in (30, 31, 6):
        w.nvml.used = used * GIB
        w.leased = Leased(segments_bytes=10 * GIB)
        w.observer._phase = Phase.TRAIN
        w.observer.enter(Phase.UPDATE, 0, {})
    texts = [record.message for record in caplog.records if "GPU holds" in record.message]
    assert len(texts) == 2
    assert "TRAIN: the GPU holds 14.00 GiB more" in texts[0]
    assert "TRAIN: the GPU holds 10.00 GiB less" in texts[1]


def test_a_budget_that_is_exceeded_ends_the_run_and_names_who_holds_most(watch: Callable[..., Watch]) -> None:
    w = watch(budget_bytes=20 * GIB)
    w.settle(used=6 * GIB)
    w.nvml.used = 30 * GIB
    w.nvml.compute = [(7, 4 * GIB), (8, 20 * GIB)]
    with pytest.raises(BudgetError, match="budget was exceeded; got 29.00 GiB used.*rollout 20.00 GiB") as caught:
        w.observer.enter(Phase.SCORE, 0, {})
    assert caught.value.where == "rollout"
    assert w.told, "the journal has the numbers too"


def test_a_driver_that_does_not_list_processes_still_lets_the_budget_be_named(watch: Callable[..., Watch]) -> None:
    w = watch(budget_bytes=20 * GIB)
    w.nvml.used = 30 * GIB
    w.nvml.fail = {"nvmlDeviceGetComputeRunningProcesses"}
    with pytest.raises(BudgetError, match="nobody"):
        w.observer.enter(Phase.SCORE, 0, {})


def test_metrics_are_those_of_the_phases_since_the_last_time(watch: Callable[..., Watch]) -> None:
    w = watch()
    assert w.observer.metrics() == {}
    w.settle(used=6 * GIB)
    w.observer.metrics()
    w.leased = Leased(segments_bytes=10 * GIB)
    for used in (17, 14):
        w.nvml.used = used * GIB
        w.observer.enter(Phase.TRAIN, 0, {})
    gb = 1e9 / GIB
    found = {name: round(value * gb, 3) for name, value in w.observer.metrics().items()}
    assert found == {
        "memory/hbm_peak_gb": 16.0,
        "memory/hbm_leased_gb": 10.0,
        "memory/hbm_overhead_gb": 5.0,
        "memory/hbm_difference_gb": -2.0,
    }
    assert w.observer.metrics() == {}


def test_a_driver_that_stops_answering_is_told_once_and_the_run_goes_on(
    watch: Callable[..., Watch], caplog: pytest.LogCaptureFixture
) -> None:
    w = watch()
    w.settle(used=6 * GIB)
    w.nvml.fail = {"nvmlDeviceGetMemoryInfo"}
    w.observer.start()
    w.observer._thread.join(DEADLINE_S)
    assert not w.observer._thread.is_alive()
    for phase in (Phase.SCORE, Phase.TRAIN):
        w.observer.enter(phase, 0, {})
    assert w.told == []
    assert w.observer.used_bytes() is None
    assert caplog.text.count("not observed any more") == 1


def test_closing_ends_the_thread(watch: Callable[..., Watch]) -> None:
    w = watch()
    w.observer.start()
    w.observer.close()
    w.observer.close()
    assert w.observer._thread not in threading.enumerate()
    assert module.PERIOD_S <= 0.05
