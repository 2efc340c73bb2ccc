"""The GPU that a node computes on, and how its workers share it.

    open_device ─► (GPU found, others gone, HBM counted) ─► start ─► MPS daemon, or turns ─► close

Owns the view of the GPU and the daemon. A daemon that cannot be had is no error: the workers then take turns on the
GPU, by the driver's time slices, with the same result; who reads the run is told. Makes no CUDA context.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from rollplex.config.config import Config
from rollplex.nvml import Gpu, GpuError, check_alone, described, open_gpu
from rollplex_coordinator.processes.environment import GpuAccess
from rollplex_coordinator.processes.mps import CONTROL, Mps, MpsError, stop_leftover

MPS, TURNS = "mps", "turns"
EXTERNAL_MPS = "ROLLPLEX_MPS_DIRECTORY"
"""Of this process's environment: where a daemon that somebody else started, for workers that somebody else started, has
its pipes. Not the variable that the driver reads: this process is no client."""
LEAVING_S = 5.0
"""How long what an earlier run left on the GPU may still take to go, on top of its own grace time."""
_PAUSE_S = 0.1

log = logging.getLogger("rollplex.coordinator")


class Sharing(Struct, frozen=True, kw_only=True):
    """How the workers share the GPU. why: of a `used` that is not what was asked."""

    asked: str
    used: str
    why: str = ""


class GpuDevice:
    """One run's GPU. `baseline_bytes`: HBM that was used before anything of ours was there."""

    def __init__(self, config: Config, run_dir: Path, gpu: Gpu) -> None:
        self.gpu = gpu
        self.mps: Mps | None = None
        self.sharing = Sharing(asked=config.device.sharing, used=TURNS)
        self._run_dir = run_dir
        self._deterministic = config.run.deterministic
        self._shares = min(config.device.prefix_share, config.device.decode_share) < 1.0
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
                self.mps = Mps(self._run_dir, self.gpu.info.uuid, variables)
            except MpsError as error:
                why = str(error)
        used = MPS if theirs or self.mps is not None else TURNS
        self.sharing = Sharing(asked=asked, used=used, why=why)
        if used != asked:
            log.warning("the workers take turns on the GPU, although device.sharing is %s: %s", asked, why)
        if used == TURNS and self._shares:
            log.warning("device.prefix_share and decode_share do nothing where workers take turns on the whole GPU")
        return self.sharing

    def free(self, pid: int) -> None:
        """Take the GPU from a worker that does not end by itself."""
        if self.mps is not None:
            try:
                self.mps.terminate(pid)
            except MpsError as error:
                log.warning("pid %d could not be taken off the GPU: %s", pid, error)

    def close(self) -> None:
        """The workers are gone: stop the daemon."""
        if self.mps is not None:
            self.mps.stop()
            self.mps = None
        self.gpu.close()


def open_device(config: Config, run_dir: Path, find: Callable[[int], Gpu] = open_gpu) -> GpuDevice | None:
    """The device of a run; None: host memory. Ends a daemon that a crashed coordinator of this run directory left.

    Raises:
        ConfigError: there is no GPU to use, or it is not ours alone.
    """
    stop_leftover(run_dir)
    if config.device.kind != "cuda":
        return None
    gpu = find(config.device.gpu)
    try:
        # The workers of a crashed coordinator leave by themselves after its grace time; its successor waits for that.
        end = time.monotonic() + config.deadlines.leave_s + LEAVING_S
        while config.memory.budget is None and _others(gpu) and time.monotonic() < end:
            time.sleep(_PAUSE_S)
        return GpuDevice(config, run_dir, gpu)
    except BaseException:
        gpu.close()
        raise


def _external(folder: str) -> tuple[bool, str]:
    """Whether external workers have a daemon of their own; if not, why."""
    if not folder:
        return False, "the workers were started by somebody else: this coordinator's daemon would not be theirs"
    if not (Path(folder) / CONTROL).exists():
        return False, f"{EXTERNAL_MPS} is {folder}, where no MPS daemon has its pipes ({CONTROL})"
    return True, ""


def _others(gpu: Gpu) -> bool:
    try:
        return bool(gpu.processes())
    except GpuError:
        return False
