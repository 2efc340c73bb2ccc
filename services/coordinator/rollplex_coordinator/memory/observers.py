"""The watch over the memory of all GPUs of a run: one `Observer` for each, begun, asked and ended together.

Owns what is said of several GPUs in one row of metrics: of one GPU its own numbers. Does not know how one is observed.

    memory/hbm_peak_gb, _leased_gb, _overhead_gb   of the GPU that held most
    memory/hbm_difference_gb                       the largest of all GPUs
    memory/hbm_peak/0:1_gb                         of each, where there are several
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from rollplex.journal.phases import Phase
from rollplex.protocol.common import Device
from rollplex_coordinator.memory.observer import DIFFERENCE, PEAK, Observer


class Observers:
    """By device, in the order of devices."""

    def __init__(self, observers: Mapping[Device, Observer]) -> None:
        self.on = observers

    def start(self) -> None:
        """Begin to look, from now on."""
        for one in self.on.values():
            one.start()

    def close(self) -> None:
        """Look no more. Again: nothing happens."""
        with ExitStack() as closing:
            for one in self.on.values():
                closing.callback(one.close)

    def loaded(self) -> None:
        """Everything is loaded and nothing works: measure the overhead."""
        for one in self.on.values():
            one.loaded()

    def enter(self, phase: Phase, step: int | None, held_on: Callable[[Device], Mapping[str, int]]) -> None:
        """The node leaves a phase for `phase`.

        Args:
            step: of the phase that ended.
            held_on: what each owner of a device held in that phase, as `Observer.enter` takes it.

        Raises:
            BudgetError: more than its budget was used of a GPU.
        """
        for device, one in self.on.items():
            one.enter(phase, step, held_on(device))

    def metrics(self) -> dict[str, float]:
        """Of the phases since the last call; nothing of a GPU whose overhead is not known."""
        found = {device: metrics for device, one in self.on.items() if (metrics := one.metrics())}
        if not found:
            return {}
        top = max(found.values(), key=lambda metrics: metrics[PEAK])
        if len(self.on) == 1:
            return top
        worst = max((metrics[DIFFERENCE] for metrics in found.values()), key=abs)
        each = {f"memory/hbm_peak/{device}_gb": metrics[PEAK] for device, metrics in found.items()}
        return {**top, DIFFERENCE: worst, **each}
