"""The ranks among which matrices are split, and the two collectives at the borders of what is split.

    copied    forward: nothing              backward: summed over the ranks
    summed    forward: summed over ranks    backward: nothing

Between a pair of matrices (one split by output features, the next by input features) every rank has numbers of its own;
everywhere else all ranks have the same numbers and the same gradients. So each rank must be given the same batch: which
collectives are called, and in which order, is then the same on all of them, with media or without.

Owns: collectives, their deadline (the process group's own) and their place in autograd. Does not know: models, shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollplex.errors import WaitError


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """This process among the ranks of one model."""

    rank: int
    size: int
    process_group: dist.ProcessGroup | None
    """Gloo or NCCL, made with a timeout. None only for a group of one."""

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
                "A collective among tensor-parallel ranks has failed",
                got=str(error),
                needed=f"all {self.size} ranks, at the same point of the same batch",
                where=f"rank {self.rank}",
            ) from error


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
