"""Tensor parallelism over gloo: four processes, in pairs or together, against the whole model.

All jobs run in one set of processes (`parallel_ranks.py`), because starting them takes longest. Storage holds NaN
wherever a rank's training shards are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollplex.errors import ConfigError, WaitError
from rollplex.layout.kv import KvLayout
from rollplex.layout.parallel.kv import rank_shape
from rollplex.layout.shape import read_shape
from rollplex.model.logprob import token_logprobs
from rollplex.model.parallel.group import TensorGroup, meet
from rollplex.model.parallel.vocabulary import VocabularyShard
from rollplex.protocol.common import Parallel

RANKS = 4
DEADLINE_S = 90.0
WRONG = "model.language_model.layers.1.self_attn.k_proj.weight"
SINGLE: dict[str, dict[str, Any]] = {
    "2 ranks": {"model": "gpu", "degree": 2, "cases": ["mixed"]},
    "4 ranks": {"model": "wide", "degree": 4, "cases": ["mixed"]},
    "4 ranks, tied, over storage of rollout 2": {
        "model": "wide", "degree": 4, "rollout": 2, "cases": ["mixed"], "tied": True,
    },
    "2 ranks over storage of rollout 1, layer inputs kept": {
        "model": "gpu", "degree": 2, "rollout": 1, "cases": ["mixed"], "layers": True,
    },
    "2 ranks, each with the whole vision tower": {
        "model": "gpu", "degree": 2, "cases": ["images"], "vision_sharded": False,
    },
    "2 ranks, vision frozen": {"model": "gpu", "degree": 2, "cases": ["images"], "frozen": True},
    "4 ranks, Qwen2-VL": {"model": "qwen2-wide", "degree": 4, "cases": ["mixed"], "tied": True},
    "2 replicas of 2 ranks, text and images": {"model": "wide", "degree": 2, "cases": ["text", "images"]},
    "2 replicas of 2 ranks, images and text": {"model": "wide", "degree": 2, "cases": ["images", "text"]},
}  # fmt: skip
FUSED = (
    "4 ranks, tied, over storage of rollout 2",
    "2 ranks over storage of rollout 1, layer inputs kept",
    "2 ranks, each with the whole vision tower",
    "4 ranks, Qwen2-VL",
)
"""Of these also with the modules that a GPU has."""
DOUBLE = ("2 ranks", "4 ranks", "4 ranks, Qwen2-VL", "2 replicas of 2 ranks, text and images")


def jobs() -> Iterator[dict[str, Any]]:
    for name, job in SINGLE.items():
        yield {"name": name, "dtype": "float32", **job}
    yield {"name": "wrong", "dtype": "float32", **SINGLE["4 ranks"], "wrong": WRONG}
    yield {
        "name": "refused",
        "dtype": "float32",
        **SINGLE["2 ranks"],
        "degree": 4,
        "rollout": 1,
        "vision_sharded": False,
    }
    for name in FUSED:
        yield {"name": f"{name}, fused", "dtype": "float32", "fused": True, **SINGLE[name]}
    for name in DOUBLE:  # last, as they change transformers' classes
        yield {"name": f"{name}, float64", "dtype": "float64", "exact": True, **SINGLE[name]}
    yield {"name": "met"}
    yield {"name": "absent"}


@pytest.fixture(scope="module")
def found(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By job: what each rank found."""
    results: dict[str, list[dict[str, Any]]]
    results = kit.found_by_ranks(tmp_path_factory.mktemp("ranks"), list(jobs()), RANKS, DEADLINE_S)
    return results


def check(results: list[dict[str, Any]], bound: float) -> None:
    for result in results:
        assert "error" not in result, result["error"]
        assert result["in place"]
        assert result["same"], "ranks differ in what all of them have"
        assert not result["not zero"]
        assert result["parts"] >= 27
        assert result["gradients"] < bound, result["worst"]
        assert max(result["logprobs"], result["entropy"], result["logits"]) < bound


@pytest.mark.parametrize("name", SINGLE)
def test_ranks_together_have_the_gradients_and_log_probabilities_of_the_whole_model(found: Any, name: str) -> None:
    check(found[name], 1e-5)


@pytest.mark.parametrize("name", FUSED)
def test_so_they_do_with_fused_modules(found: Any, name: str) -> None:
    check(found[f"{name}, fused"], 2e-5)


@pytest.mark.parametrize("name", DOUBLE)
def test_in_float64_they_agree_to_rounding(found: Any, name: str) -> None:
    check(found[f"{name}, float64"], 1e-12)


def test_a_shard_of_another_rank_is_caught(found: Any) -> None:
    for result in found["wrong"]:
        assert result["gradients"] > 1e-2
        assert result["logprobs"] > 1e-3


def test_fewer_kv_heads_than_ranks_are_refused(kit: Any, found: Any) -> None:
    for result in found["refused"]:
        assert "2 K/V heads / 4 ranks = 0.5" in result["error"]
    shape = read_shape(kit.folder("wide", False))
    with pytest.raises(ConfigError, match="4 K/V heads / 3 ranks"):
        rank_shape(shape, 3)
    whole, rank = (KvLayout(s, 2, 7, "float32").key(0).shape for s in (shape, rank_shape(shape, 4)))
    assert (whole, rank) == ((2, 4, 7, 8), (2, 1, 7, 8))


def test_a_rank_that_does_not_come_is_an_error_before_long(found: Any) -> None:
    for rank, result in enumerate(found["absent"]):
        assert ("ranks, at the same point" in result.get("error", "")) is (rank != 1)


def test_processes_that_meet_are_grouped_by_replica_and_by_rank(found: Any) -> None:
    assert found["met"] == [
        {"tensor": [0, 1], "data": [0, 2], "ranks": [0, 0]},
        {"tensor": [0, 1], "data": [1, 3], "ranks": [1, 0]},
        {"tensor": [2, 3], "data": [0, 2], "ranks": [0, 1]},
        {"tensor": [2, 3], "data": [1, 3], "ranks": [1, 1]},
    ]


def test_a_process_that_is_alone_meets_nobody() -> None:
    groups = meet(Parallel(), 1)
    assert (groups.tensor, groups.data) == (TensorGroup(rank=0, size=1, process_group=None),) * 2


def test_a_process_that_does_not_come_to_the_meeting_is_an_error_before_long(tmp_path: Path) -> None:
    place = Parallel(training=2, replicas=2, rank=1, replica=1, meet=str(tmp_path / "meet"), collective_s=0.5)
    with pytest.raises(WaitError, match=r"rank 1 of replica 1: .* needed 4 processes \(2 of 2 ranks\) at"):
        meet(place, 2)


@pytest.mark.parametrize(("device", "carriers"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_who_computes_on_a_gpu_meets_for_both_kinds_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, carriers: str
) -> None:
    asked = []

    def refuse(backend: str, **_: object) -> None:
        asked.append(backend)
        raise RuntimeError("no further")

    monkeypatch.setattr("rollplex.model.parallel.group.dist.init_process_group", refuse)
    place = Parallel(training=2, rank=1, meet=str(tmp_path / "meet"))
    with pytest.raises(WaitError, match="have not met.*no further"):
        meet(place, 2, torch.device(device))
    assert asked == [carriers]


def test_a_shard_of_padding_and_forbidden_ids_alone_leaves_finite_numbers() -> None:
    """The last rank of a small vocabulary may have nothing that can be sampled. A group of one stands for it."""
    alone = TensorGroup(rank=0, size=1, process_group=None)
    shard = VocabularyShard(group=alone, first=4, rows=4, vocab=6)
    assert sorted(shard.left_out(torch.tensor([1, 4, 5])).tolist()) == [0, 1, 2, 3]
    hidden, weight = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    values, entropies = token_logprobs(
        hidden,
        weight,
        torch.arange(3),
        torch.tensor([0, 1, 2]),
        temperature=1.0,
        never_sampled=(4, 5),
        entropy=True,
        shard=shard,
    )
    assert entropies is not None
    torch.autograd.backward([values.sum() * 1e-20 + entropies.sum()])
    for tensor in (values, entropies, hidden.grad, weight.grad):
        assert tensor is not None
        assert bool(tensor.isfinite().all())
    assert shard.here(torch.tensor([3, 4, 7, 8]))[1].tolist() == [False, True, True, False]
