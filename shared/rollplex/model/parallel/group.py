"""The ranks among which matrices are split, and the two collectives at the borders of what is split.

    copied    forward: nothing              backward: summed over the ranks
    summed    forward: summed over ranks    backward: nothing

Between a pair of matrices (one split by output features, the next by input features) every rank has numbers of its own;
everywhere else all ranks have the same numbers and the same gradients. So each rank must be given the same batch: which
collectives are called, and in which order, is then the same on all of them, with media or without.

How they find each other (`meet`): all processes of a role in one world, each in two groups of it.

    tensor    ranks that split the matrices of one replica
    data      the same rank of all replicas, which have the same shards and other prompts

What carries them, by where a tensor lies: gloo between hosts' memory, NCCL between GPUs, of which each process has one.
Both are in one group, so that counts and metrics of a process that computes on a GPU stay in host memory.

    dtype    Numbers are summed in the dtype that they have. In bfloat16 each rank's part of a product is rounded once,
             and the sum once for each further rank; log-sum-exps and entropies are float32.
    bits     Every rank ends with the same: each number is summed in one place, in one order, and copied (NCCL's rings
             and trees; never NVLink's multicast, which adds in the switch).
    when     On a GPU a collective is queued, as a kernel is. Its result may be used by kernels that are queued later;
             that it is there is known after `rollplex.model.device.finish`.

A rank that does not come:

    gloo     the collective raises: WaitError, at once if that process is dead, else at the deadline
    NCCL     a kernel waits for it, and so does whoever waits for the GPU. The coordinator names the process that died,
             failed or says nothing, and ends the others; its deadlines are shorter than that of a collective. Past
             this, torch's watchdog ends the process (SIGABRT) and says in its log which collective it was.

Owns: collectives, their deadline (the process group's own) and their place in autograd. Does not know: models, shards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollplex.errors import WaitError
from rollplex.model.device import HOST, finish
from rollplex.protocol.common import Parallel

WARM_NUMBERS = 2**20
"""Of a collective that is there to have NCCL connect."""

_CARRIERS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""torch's names, by the type of the device that a process computes on."""


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """This process among the ranks of one model."""

    rank: int
    size: int
    process_group: dist.ProcessGroup | None
    """Of gloo, or of gloo and NCCL, made with a timeout. None only for a group of one."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or (self.size > 1 and self.process_group is None):
            raise AssertionError(f"rank {self.rank} of {self.size}, process group {self.process_group}")

    def add(self, tensor: Tensor) -> Tensor:
        """Sums a contiguous tensor over the ranks, in place. Raises WaitError if a rank does not come."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest of each number over the ranks, in place. Raises WaitError as `add`."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape. Raises WaitError as `add`."""
        if self.size == 1:
            return [tensor]
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(parts, tensor, group=self.process_group))
        return parts

    def _reduce(self, tensor: Tensor, how: Any) -> Tensor:
        if self.size > 1:
            self._wait(lambda: dist.all_reduce(tensor, op=how, group=self.process_group))
        return tensor

    def _wait(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise WaitError(
                "A collective among ranks has failed",
                got=str(error),
                needed=f"all {self.size} ranks, at the same point of the same batch",
                where=f"rank {self.rank}",
            ) from error


@dataclass(frozen=True, kw_only=True)
class Groups:
    """This process among the others of its role."""

    tensor: TensorGroup
    data: TensorGroup
    """Its rank is the replica's number."""


def meet(parallel: Parallel, degree: int, device: torch.device = HOST) -> Groups:
    """Find the other processes of the role, once in the life of a process, and make both groups.

    Args:
        parallel: where this process stands. All processes of the role have the same `meet`, a file that does not exist
            yet, in a folder that does. `collective_s` is the deadline of the meeting and of every collective after it.
        degree: of the role's tensor-parallel groups: `parallel.training`, or of a rollout `parallel.rollout`.
        device: that this process computes on. Of a GPU both groups are connected when this returns, and hold what NCCL
            takes of it, so that no unit is the first to meet a GPU that cannot be reached (small collectives show it).

    Raises:
        WaitError: not all have come before the deadline, or their GPUs do not reach each other.
    """
    rank, replica, replicas = parallel.rank, parallel.replica, parallel.replicas
    tensor: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    if degree * replicas > 1:
        timeout = timedelta(seconds=parallel.collective_s)
        try:
            _join(parallel, degree, timeout, device)
            # Everybody makes every group, in one order: torch numbers them so.
            tensor = _group_of(replica, [range(n * degree, (n + 1) * degree) for n in range(replicas)], timeout)
            data = _group_of(rank, [range(n, degree * replicas, degree) for n in range(degree)], timeout)
        except RuntimeError as error:
            raise WaitError(
                "The processes of a role have not met",
                got=str(error),
                needed=f"{degree * replicas} processes ({replicas} of {degree} ranks) at {parallel.meet}",
                do="See in their logs why one of them did not come.",
                where=f"rank {rank} of replica {replica}",
            ) from error
    groups = Groups(
        tensor=TensorGroup(rank=rank, size=degree, process_group=tensor),
        data=TensorGroup(rank=replica, size=replicas, process_group=data),
    )
    if device.type != "cpu":
        for group in (groups.tensor, groups.data):
            group.add(torch.zeros(1, device=device))
            group.add(torch.zeros(WARM_NUMBERS, dtype=torch.bfloat16, device=device))  # NCCL connects by kind and size
            group.gather(torch.zeros(WARM_NUMBERS, device=device))
        finish(device)
    return groups


def _join(parallel: Parallel, degree: int, timeout: timedelta, device: torch.device) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host; without it gloo asks how the host's name resolves
    world = degree * parallel.replicas
    dist.init_process_group(
        _CARRIERS[device.type],
        store=dist.FileStore(parallel.meet, world),  # type: ignore[attr-defined]
        rank=parallel.replica * degree + parallel.rank,
        world_size=world,
        timeout=timeout,
    )


def _group_of(own: int, members: Sequence[Iterable[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Makes a group of each of `members`, which have one size; returns number `own`. None: groups of one."""
    ranks = [list(each) for each in members]
    if len(ranks[0]) == 1:
        return None
    mine: Any = [dist.new_group(each, timeout=timeout) for each in ranks][own]
    group: dist.ProcessGroup = mine
    return group


def copied(tensor: Tensor, group: TensorGroup) -> Tensor:
    """In front of a matrix that is split by output features: each rank gives a part of the input's gradient."""
    if group.size == 1:
        return tensor
    apply: Any = _Copied.apply
    out: Tensor = apply(tensor, group)
    return out


def summed(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Behind a matrix that is split by input features: each rank has a part of the sum."""
    if group.size == 1:
        return tensor
    apply: Any = _Summed.apply
    out: Tensor = apply(tensor, group)
    return out


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may have handed the same tensor to another branch.
        return ctx.group.add(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:  # noqa: ARG004 - autograd passes it
        return group.add(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - autograd passes it
        return grads[0], None
