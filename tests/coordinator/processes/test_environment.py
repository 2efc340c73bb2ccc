"""What each child finds in its environment."""

from __future__ import annotations

import pytest

from rollplex.protocol.common import Role
from rollplex_coordinator.processes.environment import WORKERS, GpuAccess, environment_of, sight_of

MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/somewhere/rollplex-mps-x", "CUDA_MPS_LOG_DIRECTORY": "/run/logs/mps"}
GPU = GpuAccess(uuid="GPU-1234", mps=MPS, deterministic=True)
OURS = {
    "PATH": "/bin",
    "CUDA_VISIBLE_DEVICES": "3",
    "CUDA_MPS_PIPE_DIRECTORY": "/somebody's",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:1",
}


def test_a_process_that_only_makes_segments_sees_the_gpu_without_the_daemon() -> None:
    assert GPU.sight == {"CUDA_VISIBLE_DEVICES": "GPU-1234", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert GPU.variables == {**GPU.sight, **MPS}


def test_on_host_memory_only_threads_and_network_are_set() -> None:
    found = environment_of(Role.TRAINER, {"PATH": "/bin", "OMP_NUM_THREADS": "64"}, 3, None)
    assert found == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.parametrize("role", sorted(WORKERS))
def test_a_worker_sees_the_run_s_gpu_alone_through_the_run_s_daemon(role: Role) -> None:
    found = environment_of(role, OURS, 1, GPU)
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-1234"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert {name: found[name] for name in MPS} == MPS
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in found
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("role", [Role.INPUT, Role.REWARD])
def test_the_coordinator_s_other_children_see_no_gpu(role: Role) -> None:
    found = environment_of(role, OURS, 1, GPU)
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert not [name for name in found if name.startswith("CUDA_MPS")]


def test_the_allocator_is_expandable_where_sglang_s_memory_saver_is_not() -> None:
    of = {role: environment_of(role, OURS, 1, GPU) for role in WORKERS}
    assert of[Role.PREFIX]["PYTORCH_ALLOC_CONF"] == of[Role.TRAINER]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in of[Role.ROLLOUT]
    assert not [role for role in WORKERS if "PYTORCH_CUDA_ALLOC_CONF" in of[role]]


def test_no_worker_is_without_docstrings() -> None:
    """transformers refuses to be imported so."""
    assert "PYTHONOPTIMIZE" not in environment_of(Role.PREFIX, {"PYTHONOPTIMIZE": "2"}, 1, None)


def test_without_a_daemon_or_determinism_nothing_is_said_of_them() -> None:
    found = environment_of(Role.PREFIX, OURS, 1, GpuAccess(uuid="GPU-1", mps={}, deterministic=False))
    assert not [name for name in found if name.startswith(("CUDA_MPS", "CUBLAS"))]


TOGETHER = {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", "NCCL_SOCKET_IFNAME"}


@pytest.mark.parametrize("role", sorted(WORKERS))
def test_workers_of_several_gpus_meet_on_this_host_and_never_by_multicast(role: Role) -> None:
    alone = environment_of(role, OURS, 1, GPU)
    several = environment_of(
        role, {**OURS, "NCCL_NVLS_ENABLE": "1"}, 1, GpuAccess(uuid="GPU-1", mps={}, deterministic=True, several=True)
    )
    assert not TOGETHER & set(alone)
    assert {name: several[name] for name in TOGETHER} == {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    assert several["CUDA_VISIBLE_DEVICES"] == "GPU-1", "its own alone"


def test_whoever_makes_segments_on_all_gpus_sees_all_of_them() -> None:
    assert sight_of(["GPU-1", "GPU-2"])["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
