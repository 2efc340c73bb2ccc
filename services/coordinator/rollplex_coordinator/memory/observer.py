"""Watches the GPU's memory while a run lives: the peak of each phase, and what the books said at that moment.

    sampler thread, every 10 ms:  NVML's number + `leased()`  ─► the reading with the most used, under a lock
    core, at each phase edge:     `enter(phase)` ─► account of the phase that ended ─► journal, log, or an error

Owns the thread and the peaks. What an account means is decided in `decisions.observed`. A driver that stops answering
is told once; the run goes on unobserved.

    sampler waits for: its period.   unblocked by: `close`
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from rollplex.journal.events import MemoryObserved
from rollplex.journal.phases import Phase
from rollplex.nvml import Gpu, GpuError
from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.observed import (
    Account,
    Leased,
    Reading,
    complaint,
    measured_overhead,
    overdrawn,
)

PERIOD_S = 0.01
CLOSE_S = 2.0
PEAK, DIFFERENCE = "memory/hbm_peak_gb", "memory/hbm_difference_gb"
_GB = 1e9

log = logging.getLogger("rollplex.coordinator")


class Observer:
    """One GPU's memory. All but the sampler belongs to the core's thread.

    Args:
        baseline_bytes: used before the run began.
        budget_bytes: what the run may use in all, overhead included.
        leased: the books of the present moment; called from the sampler too, so it only reads.
        name_of: of a process of ours, by pid; empty for others'.
        tell: journals an event.
        label: before what is logged, where the run has several GPUs.
    """

    def __init__(
        self,
        gpu: Gpu,
        device: Device,
        *,
        baseline_bytes: int,
        budget_bytes: int,
        leased: Callable[[], Leased],
        name_of: Callable[[int], str],
        tell: Callable[[MemoryObserved], None],
        label: str = "",
    ) -> None:
        self._gpu = gpu
        self._device = device
        self._baseline = baseline_bytes
        self._budget = budget_bytes
        self._leased = leased
        self._name_of = name_of
        self._tell = tell
        self._label = label
        self._overhead: int | None = None
        self._phase = Phase.LOAD
        self._complained: set[tuple[Phase, bool]] = set()
        self._step_peaks: list[Account] = []
        self._lock = threading.Lock()
        self._peak: Reading | None = None
        self._closing = threading.Event()
        self._broken = ""
        self._told_broken = False
        self._thread = threading.Thread(target=self._sample, name=f"gpu memory {device}", daemon=True)

    @property
    def overhead_bytes(self) -> int | None:
        """What no lease covers, as measured when everything was loaded; None before."""
        return self._overhead

    def start(self) -> None:
        """Begin to look, from now on."""
        self._thread.start()

    def close(self) -> None:
        """Look no more. Again: nothing happens."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def used_bytes(self) -> int | None:
        """HBM that the run uses now; None if the driver does not say."""
        reading = self._read()
        return None if reading is None else reading.used_bytes - self._baseline

    def loaded(self) -> None:
        """Everything is loaded and nothing works: measure the overhead."""
        if (reading := self._read()) is not None:
            self._overhead = measured_overhead(reading, self._baseline)
            log.info("%sHBM beside leases, everything loaded: %.2f GiB", self._label, self._overhead / 2**30)

    def enter(self, phase: Phase, step: int | None, held: Mapping[str, int]) -> None:
        """The node leaves a phase for `phase`: account for the one that ended.

        Args:
            step: of the phase that ended.
            held: by owner: what it measured under its private leases in that phase, at most.

        Raises:
            BudgetError: the node used more than its budget in that phase.
        """
        ended, self._phase = self._phase, phase
        peak = self._take()
        if self._broken and not self._told_broken:
            self._told_broken = True
            log.warning("%sthe GPU's memory is not observed any more: %s", self._label, self._broken)
        if peak is None:
            return
        account = Account(reading=peak, baseline_bytes=self._baseline, overhead_bytes=self._overhead or 0)
        self._step_peaks.append(account)
        self._tell(
            MemoryObserved(
                device=self._device,
                phase=ended.name,
                step=step,
                used_bytes=max(0, account.ours_bytes),
                segments_bytes=peak.leased.segments_bytes,
                private_bytes=dict(peak.leased.private),
                held_bytes=dict(held),
                overhead_bytes=self._overhead,
                difference_bytes=account.difference_bytes,
            )
        )
        if account.ours_bytes > self._budget:
            self._refuse(account)
        if self._overhead is not None:
            self._complain(account, ended, held)

    def metrics(self) -> dict[str, float]:
        """Of the phases since the last call: their peak, the books at that peak, the largest difference. In GB."""
        peaks, self._step_peaks = self._step_peaks, []
        if not peaks or self._overhead is None:
            return {}
        top = max(peaks, key=lambda account: account.ours_bytes)
        worst = max(peaks, key=lambda account: abs(account.difference_bytes))
        return {
            PEAK: top.ours_bytes / _GB,
            "memory/hbm_leased_gb": top.reading.leased.total_bytes / _GB,
            "memory/hbm_overhead_gb": self._overhead / _GB,
            DIFFERENCE: worst.difference_bytes / _GB,
        }

    def _refuse(self, account: Account) -> None:
        try:
            processes = self._gpu.processes()
        except GpuError as error:
            log.warning("%s", error)
            processes = ()
        names = {process.pid: name for process in processes if (name := self._name_of(process.pid))}
        refusal = overdrawn(account, self._budget, processes, names)
        if refusal is not None:
            raise refusal

    def _complain(self, account: Account, phase: Phase, held: Mapping[str, int]) -> None:
        """Once for each phase and direction: every iteration would say the same."""
        text = complaint(account, held, self._gpu.info.total_bytes)
        kind = (phase, account.difference_bytes > 0)
        if text and kind not in self._complained:
            self._complained.add(kind)
            log.warning("%s%s: %s", self._label, phase.name, text)

    def _take(self) -> Reading | None:
        """The peak since the last edge, which the present moment belongs to."""
        now = self._read()
        with self._lock:
            peak, self._peak = self._peak, None
        if now is not None and (peak is None or now.used_bytes > peak.used_bytes):
            return now
        return peak

    def _read(self) -> Reading | None:
        try:
            return Reading(used_bytes=self._gpu.used_bytes(), leased=self._leased())
        except GpuError as error:
            self._broken = str(error)
            return None

    def _sample(self) -> None:
        while not self._closing.wait(PERIOD_S):
            reading = self._read()
            if reading is None:
                return
            with self._lock:
                if self._peak is None or reading.used_bytes > self._peak.used_bytes:
                    self._peak = reading
