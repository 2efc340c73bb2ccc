"""What ranks tell each other before an update: gradients, metrics and the norm of a whole step.

    gradients   of all replicas, which had other prompts, added in the order of the replicas
    metrics     of the same, merged in the same order
    norm        of what the ranks of one replica have, each number counted once

Every process of the role ends with the same numbers, to the last bit: each adds the same parts in one order, whatever
the transport does. Owns: these sums. Does not know: segments, votes, when.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from rollplex.model.parallel.group import TensorGroup
from rollplex_trainer.metrics import StepMetrics
from rollplex_trainer.optimizer import global_norm

CHUNK_NUMBERS = 2**22
"""Of an arena, gathered from all replicas at a time."""


def sum_replicas(arena: Tensor, replicas: TensorGroup) -> None:
    """Each replica's arena becomes the sum of all. Raises WaitError if one does not come."""
    if replicas.size == 1:
        return
    for part in torch.split(arena, CHUNK_NUMBERS):
        first, *others = replicas.gather(part)
        part.copy_(first)
        for other in others:
            part.add_(other)


def merge_metrics(metrics: StepMetrics, replicas: TensorGroup) -> StepMetrics:
    """Of the whole step. Raises WaitError as `sum_replicas`."""
    if replicas.size == 1:
        return metrics
    own = torch.frombuffer(bytearray(metrics.encoded()), dtype=torch.uint8)
    sizes = [int(size) for size in replicas.gather(torch.tensor([own.numel()]))]
    room = torch.zeros(max(sizes), dtype=torch.uint8)
    room[: own.numel()] = own
    whole = StepMetrics(metrics.algorithm)
    for size, content in zip(sizes, replicas.gather(room), strict=True):
        whole.take_in(content[:size].numpy().tobytes())
    return whole


def joint_norm(counted: Iterable[Tensor], ranks: TensorGroup) -> float:
    """Euclidean norm over all ranks of a replica; not finite on any of them if a number of one is not.

    Args:
        counted: what this rank has the count of, each one row of numbers.

    Raises:
        WaitError: a rank does not come.
    """
    own = math.hypot(*(global_norm(part) for part in counted if part.numel()))
    return math.hypot(*(float(norm) for norm in ranks.gather(torch.tensor([own], dtype=torch.float64))))
