"""The GPUs of a run: one for each device, opened, shared and closed together.

    device (0, n) of the node   GPU device.gpu + n, as nvidia-smi numbers them

Owns: which GPUs there are; that all are there or none; that the workers share all of them alike. A worker sees the GPU
of its own device alone, and is a client of that GPU's daemon; the coordinator sees all, and is nobody's client. One GPU
is `device`'s own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rollplex.config.config import Config
from rollplex.errors import ConfigError
from rollplex.nvml import Gpu, GpuError, open_gpu
from rollplex.protocol.common import Device
from rollplex_coordinator.processes.device import TURNS, GpuDevice, Sharing
from rollplex_coordinator.processes.environment import GpuAccess, sight_of
from rollplex_coordinator.processes.mps import Mps, stop_leftovers

LEAVING_S = 5.0
"""How long what an earlier run left on a GPU may still take to go, on top of its own grace time."""
_PAUSE_S = 0.1

log = logging.getLogger("rollplex.coordinator")


class Gpus:
    """Those of one run, by device."""

    def __init__(self, config: Config, devices: Mapping[Device, GpuDevice]) -> None:
        self.devices = devices
        self.sharing = Sharing(asked=config.device.sharing, used=TURNS)
        """Of all of them."""
        self._shares = min(config.device.prefix_share, config.device.decode_share) < 1.0

    @property
    def free_bytes(self) -> int:
        """HBM that was free when the run began, on the GPU that had least."""
        return min(device.free_bytes for device in self.devices.values())

    @property
    def limit_bytes(self) -> int:
        """The most that the run can have in all, in equal shares."""
        return len(self.devices) * self.free_bytes

    @property
    def access(self) -> dict[Device, GpuAccess]:
        """For the processes of each device."""
        return {device: one.access for device, one in self.devices.items()}

    @property
    def sight(self) -> dict[str, str]:
        """For a process that makes segments on all of them, and computes nothing."""
        return sight_of(one.gpu.info.uuid for one in self.devices.values())

    def daemon(self, device: Device) -> Mps | None:
        """Through which the workers of a device share its GPU; None: they take turns."""
        return self.devices[device].mps

    def start(self, variables: Mapping[str, str], *, external_workers: bool) -> Sharing:
        """Start a daemon for each, if they are asked for; all are had, or none is.

        Args:
            variables, external_workers: as `GpuDevice.start` takes them.
        """
        for one in self.devices.values():
            self.sharing = one.start(variables, external_workers=external_workers)
            if self.sharing.used != self.sharing.asked:
                break
        asked, used, why = self.sharing.asked, self.sharing.used, self.sharing.why
        if used != asked:
            log.warning("the workers take turns on the GPU, although device.sharing is %s: %s", asked, why)
            for one in self.devices.values():
                one.take_turns(why)
        if used == TURNS and self._shares:
            log.warning("device.prefix_share and decode_share do nothing where workers take turns on the whole GPU")
        return self.sharing

    def start_again(self, variables: Mapping[str, str]) -> None:
        """Where the workers shared the GPUs by daemons, and all have ended: new daemons, since one that saw a fault, or
        a client that was killed, is not to be trusted.

        Args:
            variables: the environment to start them from.

        Raises:
            MpsError: one cannot be started.
        """
        for one in self.devices.values():
            one.start_again(variables)

    def free(self, device: Device, pid: int) -> None:
        """Take its GPU from a worker that does not end by itself."""
        self.devices[device].free(pid)

    def close(self) -> None:
        """The workers are gone: stop all daemons. One that fails keeps none of the others from being stopped."""
        with ExitStack() as closing:
            for one in self.devices.values():
                closing.callback(one.close)


def open_gpus(
    config: Config, run_dir: Path, devices: Sequence[Device], find: Callable[[int], Gpu] = open_gpu
) -> Gpus | None:
    """The GPUs of a run; None: host memory. Ends daemons that a crashed coordinator of this run directory left.

    Raises:
        ConfigError: there is no GPU to use, or not so many, or they are not ours alone.
    """
    stop_leftovers(run_dir)
    if config.device.kind != "cuda":
        return None
    first = config.device.gpu
    with ExitStack() as closing:
        found = [find(first)]
        closing.callback(found[0].close)
        _check_count(first, len(devices), found[0].count)
        for index in range(first + 1, first + len(devices)):
            found.append(find(index))
            closing.callback(found[-1].close)
        # The workers of a crashed coordinator leave by themselves after its grace time; its successor waits for that.
        end = time.monotonic() + config.deadlines.leave_s + LEAVING_S
        while config.memory.budget is None and any(map(_others, found)) and time.monotonic() < end:
            time.sleep(_PAUSE_S)
        opened = {
            device: GpuDevice(config, run_dir, gpu, number)
            for number, (device, gpu) in enumerate(zip(devices, found, strict=True))
        }
        closing.pop_all()
    return Gpus(config, opened)


def _check_count(first: int, wanted: int, count: int) -> None:
    if first + wanted > count:
        raise ConfigError(
            "There are not so many GPUs",
            got=f"parallel.devices: {wanted} with device.gpu: {first} on a machine with {count}",
            needed=f"at most {count - first}" + (f", or {min(wanted, count)} from GPU 0 on" if first else ""),
            do="Lower parallel.devices, or change device.gpu.",
            where="parallel.devices",
        )


def _others(gpu: Gpu) -> bool:
    try:
        return bool(gpu.processes())
    except GpuError:
        return False
