"""How much memory there is, and how much of it leases may take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.config.host import budget_bytes, less_overhead, memory_limit_bytes
from rollplex.errors import ConfigError

GIB = 2**30


def _host(root: Path, total_kib: int, cgroup: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       {total_kib} kB\nMemFree: 1 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def test_this_host_has_memory() -> None:
    assert memory_limit_bytes() > 2**28


def test_without_limits_it_is_the_memory_of_the_host(tmp_path: Path) -> None:
    root = _host(tmp_path, 8 * 2**20, "0::/a/b\n", {"a/b/memory.max": "max"})
    assert memory_limit_bytes(root) == 8 * GIB


def test_a_limit_of_the_group_or_of_one_above_it_counts(tmp_path: Path) -> None:
    limits = {"a/b/memory.max": str(5 * GIB), "a/memory.max": str(3 * GIB)}
    assert memory_limit_bytes(_host(tmp_path, 8 * 2**20, "0::/a/b\n", limits)) == 3 * GIB


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    root = _host(tmp_path, 8 * 2**20, "0::/../../outside\n", {"memory.max": str(2 * GIB)})
    assert memory_limit_bytes(root) == 2 * GIB


def test_the_first_version_of_control_groups_counts_too(tmp_path: Path) -> None:
    limits = {"memory/docker/x/memory.limit_in_bytes": str(4 * GIB), "cpu/docker/x/memory.limit_in_bytes": "1"}
    root = _host(tmp_path, 8 * 2**20, "5:cpu:/docker/x\n4:memory,hugetlb:/docker/x\n", limits)
    assert memory_limit_bytes(root) == 4 * GIB


def test_a_limit_that_means_none_does_not_count(tmp_path: Path) -> None:
    root = _host(tmp_path, 8 * 2**20, "4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"})
    assert memory_limit_bytes(root) == 8 * GIB


def test_a_host_that_does_not_tell_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not known"):
        memory_limit_bytes(tmp_path)


def test_the_budget_is_half_of_the_host_unless_it_is_given(make: Callable[..., Config]) -> None:
    config = make(memory={"overhead": "1GiB"})
    assert budget_bytes(config, 8 * GIB) == 3 * GIB
    assert budget_bytes(make(memory={"budget": "2GiB"}), 8 * GIB) == GIB


def test_each_worker_of_a_further_device_has_overhead_of_its_own(make: Callable[..., Config]) -> None:
    one, two = make().overhead_bytes, make(parallel={"devices": 2}).overhead_bytes
    apart = {"devices": 2, "placement": "disaggregated", "rollout_devices": 1}
    assert (two - one, make(parallel=apart).overhead_bytes) == (3 * 320 * 2**20, one)


def test_on_a_gpu_the_budget_is_all_that_is_free_and_the_overhead_that_of_contexts(make: Callable[..., Config]) -> None:
    cuda = {"kind": "cuda"}
    assert budget_bytes(make(device=cuda), 139 * GIB) == 131 * GIB
    assert budget_bytes(make(device=cuda, memory={"budget": "20GiB", "overhead": "1GiB"}), 139 * GIB) == 19 * GIB
    with pytest.raises(ConfigError, match="less memory free.*got 143360 MiB of memory.budget, 142336 MiB free"):
        budget_bytes(make(device=cuda, memory={"budget": "140GiB"}), 139 * GIB)


def test_several_gpus_have_a_budget_and_an_overhead_for_all_of_them(make: Callable[..., Config]) -> None:
    one = make(device={"kind": "cuda"})
    two: dict[str, Any] = {"device": {"kind": "cuda"}, "parallel": {"devices": 2}}
    assert make(**two).overhead_bytes == 2 * one.overhead_bytes
    assert budget_bytes(make(**two), 278 * GIB) == 262 * GIB
    with pytest.raises(ConfigError, match="The GPUs have less memory free.*284672 MiB free on 2 GPUs in equal shares"):
        budget_bytes(make(**two, memory={"budget": "280GiB"}), 278 * GIB)


def test_a_host_too_small_for_the_overhead_is_refused(make: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="leaves nothing") as caught:
        budget_bytes(make(memory={"overhead": "1GiB"}), 2 * GIB)
    assert caught.value.got == "1024 MiB, less 1024 MiB of memory.overhead (the processes themselves)"


def test_a_budget_is_shown_in_mib_with_what_goes_off_it() -> None:
    assert less_overhead(1285 * 2**20, 1280 * 2**20).startswith("1285 MiB, less 1280 MiB of memory.overhead")
    assert less_overhead(2**20 * 3 // 2, 0) == "1.5 MiB"
