"""What NVML says of a GPU, and which GPUs are refused."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from rollplex import nvml
from rollplex.errors import ConfigError
from rollplex.nvml import Gpu, GpuError, GpuProcess, check_alone, described
from support.fake_nvml import FakeNvml

MIB = 2**20


def test_a_gpu_is_known_by_its_uuid_name_driver_and_size_and_looking_leaves_nothing_open() -> None:
    fake = FakeNvml(total=1000, used=10)
    gpu = Gpu(fake, 0)
    info = gpu.info
    assert (info.uuid, info.name, info.driver, info.total_bytes) == ("GPU-1234", "NVIDIA H200", "580.159", 1000)
    assert gpu.used_bytes() == 10
    fake.used = 500
    assert gpu.used_bytes() == 500
    assert str(info) == "GPU 0 (NVIDIA H200, driver 580.159)"
    gpu.close()
    gpu.close()
    assert fake.open == 0


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"count": 0}, "no such GPU; got GPU 1 of 0.*at least one GPU.*device.kind to host", "device.kind"),
        ({"count": 1}, "no such GPU; got GPU 1 of 1.*Change device.gpu", "device.gpu"),
        ({"cuda": 12_080}, "driver is too old; got driver 580.159, for CUDA 12.8.*13.0 or newer", "device.kind"),
        ({"mode": 3}, "compute mode.*got exclusive.*-i 1 -c DEFAULT", "device.gpu"),
        ({"mode": 2}, "compute mode.*got prohibited", "device.gpu"),
        ({"mig": 1}, "divided into instances", "device.gpu"),
        ({"fail": {"nvmlInit"}}, "driver cannot be asked; got nvmlInit failed", "device.kind"),
        ({"fail": {"nvmlDeviceGetHandleByIndex"}}, "GPU cannot be used", "device.gpu"),
    ],
)
def test_a_gpu_that_cannot_be_shared_is_a_config_error_that_names_the_key(
    changes: dict[str, object], what: str, where: str
) -> None:
    fake = FakeNvml(count=2)
    for name, value in changes.items():
        setattr(fake, name, value)
    with pytest.raises(ConfigError, match=what) as caught:
        Gpu(fake, 1)
    assert caught.value.where == where
    assert fake.open == 0


def test_a_gpu_without_instances_at_all_is_good() -> None:
    fake = FakeNvml()
    fake.fail = {"nvmlDeviceGetMigMode"}
    assert Gpu(fake, 0).index == 0


def test_processes_are_those_with_a_context_and_the_clients_of_mps_each_once() -> None:
    fake = FakeNvml()
    fake.compute, fake.mps = [(7, 100), (9, None)], [(9, 50), (3, None)]
    assert Gpu(fake, 0).processes() == (
        GpuProcess(pid=3, used_bytes=None),
        GpuProcess(pid=7, used_bytes=100),
        GpuProcess(pid=9, used_bytes=50),
    )


def test_where_mps_is_not_supported_it_has_no_clients() -> None:
    fake = FakeNvml()
    fake.compute, fake.fail = [(7, 100)], {"nvmlDeviceGetMPSComputeRunningProcesses"}
    assert [process.pid for process in Gpu(fake, 0).processes()] == [7]


def test_a_driver_that_stops_answering_is_an_error_of_its_own() -> None:
    fake = FakeNvml()
    gpu = Gpu(fake, 0)
    fake.fail = {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"}
    with pytest.raises(GpuError, match="how much"):
        gpu.used_bytes()
    with pytest.raises(GpuError, match="processes"):
        gpu.processes()


def test_others_are_told_by_what_they_run() -> None:
    child = subprocess.Popen(["sleep", "100"])
    words = Path(f"/proc/{child.pid}/cmdline")
    while words.read_bytes() != b"sleep\x00100\x00":
        time.sleep(0.01)
    pids = (os.getpid(), child.pid)
    here, there = (described([GpuProcess(pid=pid, used_bytes=MIB)]) for pid in pids)
    assert here.startswith(f"pid {os.getpid()} (")
    assert there == f"pid {child.pid} (sleep 100) with 1 MiB"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ", ending) with" in described([GpuProcess(pid=child.pid, used_bytes=MIB)])
    child.wait()
    assert described([GpuProcess(pid=child.pid, used_bytes=MIB)]) == f"pid {child.pid} (not in sight) with 1 MiB"


def test_others_on_the_gpu_are_refused_unless_the_budget_says_what_is_ours() -> None:
    fake = FakeNvml()
    fake.compute = [(7, 100 * MIB), (8, None)]
    gpu = Gpu(fake, 0)
    refused = r"got pid 7 \(.*\) with 100 MiB, pid 8 \(.*\) with an unknown amount.*memory.budget"
    with pytest.raises(ConfigError, match=refused):
        check_alone(gpu, (), budget_is_set=False)
    assert [process.pid for process in check_alone(gpu, (7,), budget_is_set=True)] == [8]
    assert check_alone(gpu, (7, 8), budget_is_set=False) == ()


def test_a_missing_package_is_a_config_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("rollplex.nvml.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"No module named 'pynvml'.*rollplex\[cuda\]"):
        nvml.open_gpu(0)
