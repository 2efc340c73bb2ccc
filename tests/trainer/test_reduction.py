"""Sums over ranks with stand-ins for the other processes; with real ones: test_ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollplex.model.parallel.group import TensorGroup
from rollplex_trainer import reduction
from rollplex_trainer.metrics import StepMetrics
from rollplex_trainer.reduction import joint_norm, merge_metrics, sum_replicas
from support.trainer import ALGORITHM


class Others(TensorGroup):
    """A group in which each gather finds what the test says; this process's own part is at its rank."""

    def __init__(self, rank: int, size: int, answers: list[list[Tensor]]) -> None:
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "process_group", None)
        object.__setattr__(self, "answers", answers)

    answers: list[list[Tensor]]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        others = self.answers.pop(0)
        assert all(other.shape == tensor.shape for other in others)
        return [*others[: self.rank], tensor.clone(), *others[self.rank :]]


def test_arenas_are_added_in_the_order_of_the_replicas_wherever_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "CHUNK_NUMBERS", 4)
    arenas = [torch.tensor([1e8, 1.0, 3.0, 0.5, -1.0, 2.0]) * scale for scale in (1.0, -1.0, 1e-8)]
    wanted = (arenas[0] + arenas[1]) + arenas[2]
    assert not torch.equal(wanted, arenas[0] + (arenas[1] + arenas[2])), "the order is seen"
    for rank in range(3):
        own, others = arenas[rank].clone(), [arena for n, arena in enumerate(arenas) if n != rank]
        pieces = [[other[:4] for other in others], [other[4:] for other in others]]
        sum_replicas(own, Others(rank, 3, pieces))
        assert torch.equal(own, wanted)


def test_metrics_of_unlike_sizes_are_merged() -> None:
    long, short = StepMetrics(ALGORITHM), StepMetrics(ALGORITHM)
    long._rewards = [torch.tensor([1.0, 0.0]).double().numpy()] * 3
    long._spread = [True] * 3
    long.normaliser, short.normaliser = 6.0, 1.0
    sizes = [len(each.encoded()) for each in (long, short)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: sizes[0]] = torch.frombuffer(bytearray(long.encoded()), dtype=torch.uint8)
    others = Others(1, 2, [[torch.tensor([sizes[0]])], [padded]])
    merged = merge_metrics(short, others)
    assert merged.normaliser == 7.0
    assert merged.result(grad_norm=1.0, learning_rate=1.0)["groups"] == 3.0


def test_alone_nothing_is_gathered() -> None:
    alone = TensorGroup(rank=0, size=1, process_group=None)
    arena, metrics = torch.tensor([1.0, 2.0]), StepMetrics(ALGORITHM)
    sum_replicas(arena, alone)
    assert arena.tolist() == [1.0, 2.0]
    assert merge_metrics(metrics, alone) is metrics


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_counts_each_part_once_and_one_bad_rank_is_seen_by_all(bad: float) -> None:
    own = [torch.tensor([3.0]), torch.tensor([0.0, 4.0]), torch.empty(0)]
    others = [torch.tensor([12.0], dtype=torch.float64)]
    assert joint_norm(own, Others(0, 2, [others])) == 13.0
    assert not math.isfinite(joint_norm(own, Others(0, 2, [[torch.tensor([bad], dtype=torch.float64)]])))
    assert not math.isfinite(joint_norm([torch.tensor([bad])], Others(0, 2, [others])))
