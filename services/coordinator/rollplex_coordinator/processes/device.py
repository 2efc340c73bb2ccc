"""One GPU that a node computes on, and how its workers share it.

    GPU found ─► others gone, HBM counted ─► start ─► MPS daemon, or turns ─► close

Owns the view of the GPU and the daemon. A daemon that cannot be had is no error: the workers then take turns on the
GPU, by the driver's time slices, with the same result; who reads the run is told. Makes no CUDA context. Which GPUs a
run has, and that they are all shared alike, is `gpus`' own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from rollplex.config.config import Config
from rollplex.nvml import Gpu, GpuError, check_alone, described
from rollplex_coordinator.processes.environment import GpuAccess
from rollplex_coordinator.processes.mps import CONTROL, Mps, MpsError

MPS, TURNS = "mps", "turns"
EXTERNAL_MPS = "ROLLPLEX_MPS_DIRECTORY"
"""Of this process's environment: where a daemon that somebody else started, for workers that somebody else started, has
its pipes. Not the variable that the driver reads: this process is no client."""

log = logging.getLogger("rollplex.coordinator")


class Sharing(Struct, frozen=True, kw_only=True):
    """How the workers share the GPU. why: of a `used` that is not what was asked."""

    asked: str
    used: str
    why: str = ""


class GpuDevice:
    """One of a run's GPUs. `baseline_bytes`: HBM that was used before anything of ours was there.

    Args:
        number: among the run's, from 0 on.
    """

    def __init__(self, config: Config, run_dir: Path, gpu: Gpu, number: int = 0) -> None:
        self.gpu = gpu
        self.mps: Mps | None = None
        self.sharing = Sharing(asked=config.device.sharing, used=TURNS)
        self._run_dir = run_dir
        self._number = number
        self._deterministic = config.run.deterministic
        self._several = config.parallel.devices > 1
        try:
            others = check_alone(gpu, (), budget_is_set=config.memory.budget is not None)
        except GpuError as error:  # some containers may not list processes
            log.warning("whether others use the GPU is not known: %s", error)
            others = ()
        if others:
            log.warning("%s is used by others too: %s", gpu.info, described(others))
        self.baseline_bytes = gpu.used_bytes()

    @property
    def free_bytes(self) -> int:
        """HBM that was free when the run began: the most that it can have."""
        return max(0, self.gpu.info.total_bytes - self.baseline_bytes)

    @property
    def access(self) -> GpuAccess:
        """For the processes that may use it."""
        return GpuAccess(
            uuid=self.gpu.info.uuid,
            mps={} if self.mps is None else self.mps.variables,
            deterministic=self._deterministic,
            several=self._several,
        )

    def start(self, variables: Mapping[str, str], *, external_workers: bool) -> Sharing:
        """Start the daemon, if it is asked for and can be had.

        Args:
            variables: the environment to start it from.
            external_workers: somebody else starts the workers, and decides how they share.
        """
        asked, why = self.sharing.asked, ""
        theirs = False
        if asked == MPS and external_workers:
            theirs, why = _external(variables.get(EXTERNAL_MPS, ""))
        elif asked == MPS:
            try:
                self.mps = Mps(self._run_dir, self.gpu.info.uuid, variables, self._number)
            except MpsError as error:
                why = str(error)
        used = MPS if theirs or self.mps is not None else TURNS
        self.sharing = Sharing(asked=asked, used=used, why=why)
        return self.sharing

    def take_turns(self, why: str) -> None:
        """No daemon any more, before a worker is there."""
        self._stop()
        self.sharing = Sharing(asked=self.sharing.asked, used=TURNS, why=why)

    def start_again(self, variables: Mapping[str, str]) -> None:
        """A new daemon, if the workers share by one, once they have ended. Raises MpsError; then there is none."""
        if self.sharing.used == MPS:
            self._stop()
            self.mps = Mps(self._run_dir, self.gpu.info.uuid, variables, self._number)

    def free(self, pid: int) -> None:
        """Take the GPU from a worker that does not end by itself."""
        if self.mps is not None:
            try:
                self.mps.terminate(pid)
            except MpsError as error:
                log.warning("pid %d could not be taken off the GPU: %s", pid, error)

    def close(self) -> None:
        """The workers are gone: stop the daemon."""
        self._stop()
        self.gpu.close()

    def _stop(self) -> None:
        if self.mps is not None:
            self.mps.stop()
            self.mps = None


def _external(folder: str) -> tuple[bool, str]:
    """Whether external workers have a daemon of their own; if not, why."""
    if not folder:
        return False, "the workers were started by somebody else: this coordinator's daemon would not be theirs"
    if not (Path(folder) / CONTROL).exists():
        return False, f"{EXTERNAL_MPS} is {folder}, where no MPS daemon has its pipes ({CONTROL})"
    return True, ""
