"""A run's GPUs: found, counted, shared by daemons or in turns; what a run tells of them; all of several, or none."""

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
from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.fleet import DEVICE, fleet_of
from rollplex_coordinator.processes import device as device_module
from rollplex_coordinator.processes import gpus as module
from rollplex_coordinator.processes.device import EXTERNAL_MPS, Sharing
from rollplex_coordinator.processes.gpus import Gpus, open_gpus
from rollplex_coordinator.processes.mps import CONTROL, Mps, MpsError
from support import fake_mps
from support.core import make_config
from support.fake_nvml import FakeNvml

GIB = 2**30
SECOND = Device(index=1)


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


def opened(config: Config, run_dir: Path, fake: FakeNvml) -> Gpus:
    gpus = open_gpus(config, run_dir, fleet_of(config).devices, lambda index: Gpu(fake, index))
    assert gpus is not None
    return gpus


def test_on_host_memory_there_is_no_device_and_nvml_is_not_asked(model_folder: Path, tmp_path: Path) -> None:
    def never(index: int) -> Gpu:
        raise AssertionError

    assert open_gpus(make_config(model_folder), tmp_path, [DEVICE], never) is None


def test_what_the_driver_holds_before_the_run_is_not_ours(cuda: Callable[..., Config], tmp_path: Path) -> None:
    fake = FakeNvml(total=140 * GIB, used=GIB)
    gpus = opened(cuda(), tmp_path, fake)
    fake.used = 100 * GIB
    assert (gpus.devices[DEVICE].baseline_bytes, gpus.free_bytes, gpus.limit_bytes) == (GIB, 139 * GIB, 139 * GIB)
    gpus.close()
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
    with pytest.raises(ConfigError, match=r"Other processes use the GPU; got pid 99 \(.*\) with 1,024 MiB"):
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
    gpus = opened(cuda(), tmp_path, FakeNvml())
    assert gpus.access[DEVICE].mps == {}
    assert gpus.start(variables, external_workers=False) == Sharing(asked="mps", used="mps")
    daemon = gpus.daemon(DEVICE)
    assert daemon is not None
    assert gpus.access[DEVICE].mps == daemon.variables
    assert not gpus.access[DEVICE].several
    gpus.free(DEVICE, 77)
    assert fake_mps.calls(tmp_path)[-1] == "terminate_client 4242 77"
    gpus.close()
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
    gpus = opened(cuda(), tmp_path, FakeNvml())
    sharing = gpus.start({**variables, **change}, external_workers=False)
    assert (sharing.asked, sharing.used) == ("mps", "turns")
    assert why in sharing.why
    assert why in caplog.text
    assert gpus.access[DEVICE].mps == {}
    gpus.free(DEVICE, 77)
    gpus.close()


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
    gpus = opened(config, tmp_path, FakeNvml())
    gpus.start(variables, external_workers=False)
    assert caplog.text.count("do nothing where workers take turns") == told
    gpus.close()


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
    gpus = opened(cuda(), tmp_path, FakeNvml())
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    variables |= {EXTERNAL_MPS: str(pipes)}
    assert "where no MPS daemon has its pipes" in gpus.start(variables, external_workers=True).why
    (pipes / CONTROL).touch()
    assert gpus.start(variables, external_workers=True) == Sharing(asked="mps", used="mps")
    assert gpus.daemon(DEVICE) is None
    assert gpus.access[DEVICE].mps == {}  # nothing of ours is its client
    gpus.free(DEVICE, 77)
    gpus.close()
    assert fake_mps.calls(tmp_path) == []


def test_daemons_that_a_crashed_coordinator_left_are_stopped_before_a_gpu_is_looked_at(
    cuda: Callable[..., Config], tmp_path: Path, variables: dict[str, str]
) -> None:
    crashed = [Mps(tmp_path, "GPU-1234", variables, number) for number in range(3)]  # of a run with more GPUs
    there: list[bool] = []

    def find(index: int) -> Gpu:
        there.extend(daemon.alive for daemon in crashed)
        return Gpu(FakeNvml(), index)

    gpus = open_gpus(cuda(), tmp_path, [DEVICE], find)
    assert gpus is not None
    gpus.close()
    assert there == [False] * 3


# --- several ------------------------------------------------------------------------------------------------------


def test_device_n_has_the_nth_gpu_from_the_configured_one_on(cuda: Callable[..., Config], tmp_path: Path) -> None:
    fake = FakeNvml(total=140 * GIB, used=GIB, count=4)
    fake.used_by = {3: 5 * GIB}
    config = cuda(parallel={"devices": 2})
    gpus = opened(config.model_copy(update={"device": config.device.model_copy(update={"gpu": 2})}), tmp_path, fake)
    assert {device: one.gpu.index for device, one in gpus.devices.items()} == {DEVICE: 2, SECOND: 3}
    assert [one.baseline_bytes for one in gpus.devices.values()] == [GIB, 5 * GIB]
    assert (gpus.free_bytes, gpus.limit_bytes) == (135 * GIB, 270 * GIB), "equal shares: as much of each as all have"
    assert gpus.sight["CUDA_VISIBLE_DEVICES"] == "GPU-1234-2,GPU-1234-3"
    assert [access.uuid for access in gpus.access.values()] == ["GPU-1234-2", "GPU-1234-3"]
    assert all(access.several for access in gpus.access.values())
    gpus.close()
    assert fake.open == 0


@pytest.mark.parametrize(("count", "got"), [(2, "device.gpu: 0 on a machine with 2"), (1, "with 1")])
def test_more_gpus_than_there_are_are_refused_by_the_names_of_both_keys(
    cuda: Callable[..., Config], tmp_path: Path, count: int, got: str
) -> None:
    fake = FakeNvml(count=count)
    with pytest.raises(ConfigError, match=got) as caught:
        opened(cuda(parallel={"devices": 3}), tmp_path, fake)
    assert (caught.value.where, caught.value.needed) == ("parallel.devices", f"at most {count}")
    assert "device.gpu" in caught.value.do
    assert fake.open == 0


def test_somebody_else_on_any_of_them_is_refused_and_all_are_closed(
    cuda: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVING_S", 0.1)
    fake = FakeNvml(count=2)
    fake.compute_on = {1: [(99, GIB)]}
    with pytest.raises(ConfigError, match="Other processes use the GPU; got pid 99") as caught:
        opened(cuda(parallel={"devices": 2}), tmp_path, fake)
    assert "GPU 1" in caught.value.where
    assert fake.open == 0


def test_each_has_a_daemon_of_its_own_whose_clients_are_freed_there(
    cuda: Callable[..., Config], tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = opened(cuda(parallel={"devices": 2}), tmp_path, FakeNvml(count=2))
    assert gpus.start(variables, external_workers=False) == Sharing(asked="mps", used="mps")
    first, second = gpus.daemon(DEVICE), gpus.daemon(SECOND)
    assert first is not None
    assert second is not None
    assert [line for line in fake_mps.calls(tmp_path) if line.startswith("-d")] == ["-d GPU-1234", "-d GPU-1234-1"]
    assert [(tmp_path / name).readlink() for name in ("mps", "mps-1")] == [first.folder, second.folder]
    assert second.log_dir == tmp_path / "logs" / "mps-1"
    assert [access.mps for access in gpus.access.values()] == [first.variables, second.variables]
    asked: list[int] = []
    monkeypatch.setattr(second, "terminate", asked.append)
    gpus.free(SECOND, 77)
    assert asked == [77]
    gpus.close()
    assert not first.alive
    assert not second.alive
    assert not [name for name in ("mps", "mps-1") if (tmp_path / name).is_symlink()]


def test_if_one_daemon_cannot_be_had_none_is_and_all_workers_take_turns(
    cuda: Callable[..., Config],
    tmp_path: Path,
    variables: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoSecond(Mps):
        def __init__(self, run_dir: Path, gpu_uuid: str, variables: dict[str, str], number: int = 0) -> None:
            super().__init__(run_dir, gpu_uuid, {**variables, "FAKE_MPS": "fail" if number else ""}, number)

    monkeypatch.setattr(device_module, "Mps", NoSecond)
    gpus = opened(cuda(parallel={"devices": 2}), tmp_path, FakeNvml(count=2))
    sharing = gpus.start(variables, external_workers=False)
    assert (sharing.asked, sharing.used) == ("mps", "turns")
    assert [one.sharing for one in gpus.devices.values()] == [sharing, sharing]
    assert caplog.text.count("the workers take turns on the GPU") == 1
    assert [gpus.daemon(device) for device in (DEVICE, SECOND)] == [None, None]
    assert fake_mps.calls(tmp_path)[-1] == "quit -t 1"
    assert not (tmp_path / "mps").is_symlink()
    gpus.close()


def test_after_a_fault_each_gpu_has_a_new_daemon(
    cuda: Callable[..., Config], tmp_path: Path, variables: dict[str, str]
) -> None:
    gpus = opened(cuda(parallel={"devices": 2}), tmp_path, FakeNvml(count=2))
    gpus.start(variables, external_workers=False)
    old = [gpus.daemon(DEVICE), gpus.daemon(SECOND)]
    gpus.start_again(variables)
    new = [gpus.daemon(DEVICE), gpus.daemon(SECOND)]
    assert [daemon.alive for daemon in (*old, *new) if daemon is not None] == [False, False, True, True]
    assert [access.mps for access in gpus.access.values()] == [daemon.variables for daemon in new if daemon is not None]
    with pytest.raises(MpsError, match="could not be started"):
        gpus.start_again({**variables, "FAKE_MPS": "fail"})
    gpus.start_again(variables)
    assert gpus.daemon(DEVICE) is not None, "the workers share by it still, once it can be had"
    gpus.close()


def test_where_workers_take_turns_there_is_nothing_to_start_again(
    cuda: Callable[..., Config], tmp_path: Path, variables: dict[str, str]
) -> None:
    gpus = opened(cuda(sharing="turns"), tmp_path, FakeNvml())
    gpus.start(variables, external_workers=False)
    gpus.start_again(variables)
    assert gpus.daemon(DEVICE) is None
    gpus.close()
