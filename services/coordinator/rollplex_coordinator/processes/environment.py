"""The environment of each child: threads, network, and which of them may see the GPU. Pure.

role                       sees the GPU   allocator of torch
-------------------------  -------------  ----------------------------------------------------------------------
prefix, trainer            yes            expandable segments: batches of many shapes do not fragment the budget
rollout                    yes            as it is: SGLang's memory saver replaces cudaMalloc and refuses the former
input, reward, and others  no             none: a CUDA context by accident would cost half a GiB of HBM

A worker sees the GPU of its device alone, whatever other GPUs the run has: those of a role meet by sockets of this host
and by memory of the peers', which they are sent. NVLink's multicast is off for whatever they meet by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from rollplex.multicast import NO_MULTICAST
from rollplex.protocol.common import Role

WORKERS = frozenset({Role.ROLLOUT, Role.PREFIX, Role.TRAINER})
_EXPANDABLE = frozenset({Role.PREFIX, Role.TRAINER})
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name that torch reads, and an older one that it reads too but warns of."""
_MPS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
_TOGETHER = {**NO_MULTICAST, "NCCL_SOCKET_IFNAME": "lo"}
"""For processes that work together on several GPUs of this host."""


class GpuAccess(Struct, frozen=True, kw_only=True):
    """What it takes to use a GPU of the run.

    mps: variables that lead to its daemon; empty without one. several: the run has others too.
    """

    uuid: str
    mps: dict[str, str]
    deterministic: bool
    several: bool = False

    @property
    def sight(self) -> dict[str, str]:
        """For a process that opens the driver: it sees this GPU alone, whatever else there is."""
        return sight_of([self.uuid])

    @property
    def variables(self) -> dict[str, str]:
        """For a process that computes there: by the daemon, if there is one."""
        return self.sight | self.mps | (_TOGETHER if self.several else {})


def sight_of(uuids: Iterable[str]) -> dict[str, str]:
    """For a process that sees these GPUs, in this order, and no others."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def environment_of(role: Role, base: Mapping[str, str], threads: int, gpu: GpuAccess | None) -> dict[str, str]:
    """The environment of a child.

    Args:
        role: of the child.
        base: the coordinator's own environment.
        threads: arithmetic threads, so that pools do not fight for cores.
        gpu: that of the child's device; None on host memory.
    """
    variables = {
        **base,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)),
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    variables.pop("PYTHONOPTIMIZE", None)  # transformers reads its own docstrings, and refuses to be without them
    if gpu is None:
        return variables
    for name in _MPS:
        variables.pop(name, None)
    if role not in WORKERS:
        return variables | {"CUDA_VISIBLE_DEVICES": ""}
    for name in _ALLOCATOR:
        variables.pop(name, None)
    variables |= gpu.variables
    if role in _EXPANDABLE:
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if gpu.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS may give other bits in each process
    return variables
