"""The run's GPU: found, counted, shared by a daemon or in turns; what a run tells of it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.nvml import Gpu
from rollplex_coordinator.processes import device as module
from rollplex_coordinator.processes.device import EXTERNAL_MPS, GpuDevice, Sharing, open_device
from rollplex_coordinator.processes.mps import CONTROL, Mps
from support import fake_mps
from support.core import make_config
from support.fake_nvml import FakeNvml

GIB = 2**30
Make = Callable[..., GpuDevice]


@pytest.fixture
def cuda(model_folder: Path) -> Callable[..., Config]:
    """cuda(memory={...}): a configuration for a GPU."""

    def make(sharing: str = "mps", **sections: Any) -> Config:
        return make_config(
            model_folder, device={"kind": "cuda", "sharing": sharing}, deadlines={"leave_s": 0.1}, **sections
        )

    return make


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return fake_mps.install(tmp_path)


def opened(config: Config, run_dir: Path, fake: FakeNvml) -> GpuDevice:
    device = open_device(config, run_dir, lambda index: Gpu(fake, index))
    assert device is not None
    return device


def test_on_host_memory_there_is_no_device_and_nvml_is_not_asked(model_folder: Path, tmp_path: Path) -> None:
    def never(index: int) -> Gpu:
        raise AssertionError

    assert open_device(make_config(model_folder), tmp_path, never) is None


def test_what_the_driver_holds_before_the_run_is_not_ours(cuda: Callable[..., Config], tmp_path: Path) -> None:
    fake = FakeNvml(total=140 * GIB, used=GIB)
    device = opened(cuda(), tmp_path, fake)
    fake.used = 100 * GIB
    assert (device.baseline_bytes, device.free_bytes) == (GIB, 139 * GIB)
    device.close()
    assert fake.open == 0


def test_who_else_is_on_the_gpu_is_given_the_time_to_leave_then_refused(
    cuda: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVING_S", 5.0)
    fake = FakeNvml()
    fake.compute = [(99, GIB)]
    leaving = threading.Timer(0.3, fake.compute.clear)
    leaving.start()
    opened(cuda(), tmp_path, fake).close()
    monkeypatch.setattr(module, "LEAVING_S", 0.1)
    fake.compute = [(99, GIB)]
    with pytest.raises(ConfigError, match="Other processes use the GPU; got pid 99 with 1,024 MiB"):
        opened(cuda(), tmp_path, fake)
    assert fake.open == 0


def test_a_driver_that_may_not_list_processes_is_a_warning(
    cuda: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeNvml()
    fake.fail = {"nvmlDeviceGetComputeRunningProcesses"}
    opened(cuda(), tmp_path, fake).close()
    assert "whether others use the GPU is not known" in caplog.text


def test_a_budget_of_the_user_s_lets_others_stay(
    cuda: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeNvml()
    fake.compute = [(99, GIB)]
    opened(cuda(memory={"budget": "60GiB"}), tmp_path, fake).close()
    assert "used by others too: pid 99" in caplog.text


def test_the_daemon_is_started_when_it_is_asked_for_and_clients_are_told_where_it_is(
    cuda: Callable[..., Config], tmp_path: Path, variables: dict[str, str]
) -> None:
    device = opened(cuda(), tmp_path, FakeNvml())
    assert device.access.mps == {}
    assert device.start(variables, external_workers=False) == Sharing(asked="mps", used="mps")
    assert device.mps is not None
    assert device.access.mps == device.mps.variables
    device.free(77)
    assert fake_mps.calls(tmp_path)[-1] == "terminate_client 4242 77"
    device.close()
    assert fake_mps.calls(tmp_path)[-1] == "quit -t 1"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"PATH": "/nowhere"}, "the MPS daemon is not installed"),
        ({"FAKE_MPS": "fail"}, "could not be started; got exit code 1"),
    ],
)
def test_without_a_daemon_the_workers_take_turns_and_the_log_says_why(
    cuda: Callable[..., Config],
    tmp_path: Path,
    variables: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    change: dict[str, str],
    why: str,
) -> None:
    device = opened(cuda(), tmp_path, FakeNvml())
    sharing = device.start({**variables, **change}, external_workers=False)
    assert (sharing.asked, sharing.used) == ("mps", "turns")
    assert why in sharing.why
    assert why in caplog.text
    assert device.access.mps == {}
    device.free(77)
    device.close()


@pytest.mark.parametrize(("sharing", "told"), [("turns", 1), ("mps", 0)])
def test_shares_of_the_gpu_that_turns_cannot_keep_are_told(
    model_folder: Path,
    tmp_path: Path,
    variables: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    sharing: str,
    told: int,
) -> None:
    config = make_config(model_folder, device={"kind": "cuda", "sharing": sharing, "prefix_share": 0.5})
    device = opened(config, tmp_path, FakeNvml())
    device.start(variables, external_workers=False)
    assert caplog.text.count("do nothing where workers take turns") == told
    device.close()


def test_turns_that_are_asked_for_and_workers_of_somebody_else_s_get_no_daemon(
    cuda: Callable[..., Config], tmp_path: Path, variables: dict[str, str]
) -> None:
    asked = opened(cuda("turns"), tmp_path, FakeNvml())
    assert asked.start(variables, external_workers=False) == Sharing(asked="turns", used="turns")
    theirs = opened(cuda(), tmp_path, FakeNvml())
    assert "somebody else" in theirs.start(variables, external_workers=True).why
    assert fake_mps.calls(tmp_path) == []


def test_workers_of_somebody_else_s_may_have_a_daemon_of_their_own_whose_pipes_are_looked_for(
    cuda: Callable[..., Config], tmp_path: Path, variables: dict[str, str]
) -> None:
    device = opened(cuda(), tmp_path, FakeNvml())
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    variables |= {EXTERNAL_MPS: str(pipes)}
    assert "where no MPS daemon has its pipes" in device.start(variables, external_workers=True).why
    (pipes / CONTROL).touch()
    assert device.start(variables, external_workers=True) == Sharing(asked="mps", used="mps")
    assert device.mps is None
    assert device.access.mps == {}  # nothing of ours is its client
    device.free(77)
    device.close()
    assert fake_mps.calls(tmp_path) == []


def test_a_daemon_that_a_crashed_coordinator_left_is_stopped_before_the_gpu_is_looked_at(
    cuda: Callable[..., Config], tmp_path: Path, variables: dict[str, str]
) -> None:
    crashed = Mps(tmp_path, "GPU-1234", variables)
    there: list[bool] = []

    def find(index: int) -> Gpu:
        there.append(crashed.alive)
        return Gpu(FakeNvml(), index)

    device = open_device(cuda(), tmp_path, find)
    assert device is not None
    device.close()
    assert there == [False]
