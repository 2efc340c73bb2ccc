"""The watch over several GPUs: what one row of metrics says of them, and that all are begun and ended."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from rollplex.journal.events import MemoryObserved
from rollplex.journal.phases import Phase
from rollplex.nvml import Gpu
from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.observed import Leased
from rollplex_coordinator.memory.observer import Observer
from rollplex_coordinator.memory.observers import Observers
from support.fake_nvml import FakeNvml

GIB, GB = 2**30, 1e9
FIRST, SECOND = Device(), Device(index=1)


class Two:
    """GPUs of a hundred GiB, of each of which one was used before the run."""

    def __init__(self, count: int = 2) -> None:
        self.nvml = FakeNvml(total=100 * GIB, used=GIB, count=count)
        self.leased = {FIRST: Leased(), SECOND: Leased()}
        self.told: list[MemoryObserved] = []
        self.observers = Observers({device: self._observer(device) for device in (FIRST, SECOND)[:count]})

    def _observer(self, device: Device) -> Observer:
        return Observer(
            Gpu(self.nvml, device.index),
            device,
            baseline_bytes=GIB,
            budget_bytes=50 * GIB,
            leased=lambda: self.leased[device],
            name_of=lambda _: "",
            tell=self.told.append,
            label=f"device {device}: ",
        )

    def use(self, *gib: int) -> None:
        self.nvml.used_by = {number: size * GIB for number, size in enumerate(gib)}

    def enter(self, phase: Phase) -> None:
        self.observers.enter(phase, 3, lambda device: {"prefix": device.index})


def rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {name: round(value * GB / GIB, 3) for name, value in metrics.items()}


def test_a_row_is_of_the_fullest_gpu_with_the_largest_difference_of_any_and_the_peak_of_each() -> None:
    two = Two()
    two.use(3, 4)
    two.observers.loaded()
    two.leased = {FIRST: Leased(segments_bytes=10 * GIB), SECOND: Leased(segments_bytes=20 * GIB)}
    two.use(9, 25)
    two.enter(Phase.IDLE)
    assert rounded(two.observers.metrics()) == {
        "memory/hbm_peak_gb": 24.0,
        "memory/hbm_leased_gb": 20.0,
        "memory/hbm_overhead_gb": 3.0,
        "memory/hbm_difference_gb": -4.0,
        "memory/hbm_peak/0:0_gb": 8.0,
        "memory/hbm_peak/0:1_gb": 24.0,
    }
    assert two.observers.metrics() == {}
    assert [(event.device, event.held_bytes) for event in two.told] == [(FIRST, {"prefix": 0}), (SECOND, {"prefix": 1})]


def test_a_row_of_one_gpu_is_its_observer_s() -> None:
    one = Two(count=1)
    one.use(3)
    one.observers.loaded()
    one.enter(Phase.IDLE)
    found = one.observers.metrics()
    assert sorted(found) == sorted(f"memory/hbm_{name}_gb" for name in ("peak", "leased", "overhead", "difference"))


def test_what_is_told_of_one_names_its_device(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    two = Two()
    two.observers.loaded()
    two.use(1, 40)
    two.enter(Phase.TRAIN)
    assert "device 0:0: HBM beside leases" in caplog.text
    assert "device 0:1: LOAD: the GPU holds 39.00 GiB more" in caplog.text
    assert "device 0:0: LOAD" not in caplog.text


def test_all_are_begun_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two()
    two.observers.start()
    threads: list[Any] = [one._thread for one in two.observers.on.values()]
    assert all(thread in threading.enumerate() for thread in threads)

    def fail() -> None:
        raise OSError("no")

    with monkeypatch.context() as broken:
        broken.setattr(two.observers.on[SECOND], "close", fail)
        with pytest.raises(OSError, match="no"):
            two.observers.close()
        assert threads[0] not in threading.enumerate(), "one that cannot be ended keeps no other"
    two.observers.close()
    assert not [thread for thread in threads if thread in threading.enumerate()]
