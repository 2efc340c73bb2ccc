"""Tensor parallelism over NCCL: two processes, each on a GPU of its own, against the whole model on the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from support.gpus import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEADLINE_S = 240.0
JOBS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32, fused": {"dtype": "float32", "fused": True},
    "over storage of rollout 1, layer inputs kept": {"dtype": "float32", "rollout": 1, "layers": True},
    "bfloat16, fused": {"dtype": "bfloat16", "fused": True},
    "bfloat16, over storage of rollout 1": {"dtype": "bfloat16", "fused": True, "rollout": 1, "tied": True},
}
TOGETHER = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@pytest.fixture(scope="module")
def found(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """By job: what each rank found."""
    every: dict[str, Any] = {"model": "gpu", "degree": 2, "cases": ["mixed"]}
    jobs: list[dict[str, Any]] = [{"name": "met"}, *({"name": name, **every, **job} for name, job in JOBS.items())]
    with gpus(2) as two, pytest.MonkeyPatch.context() as patch:
        for name, value in TOGETHER.items():
            patch.setitem(os.environ, name, value)
        uuids = [gpu.info.uuid for gpu in two]
        yield kit.found_by_ranks(tmp_path_factory.mktemp("ranks"), jobs, 2, DEADLINE_S, uuids=uuids)


def test_processes_on_two_gpus_meet(found: Any) -> None:
    assert [result["tensor"] for result in found["met"]] == [[0, 1]] * 2


@pytest.mark.parametrize("name", JOBS)
def test_two_gpus_have_the_gradients_and_log_probabilities_of_the_whole_model(found: Any, name: str) -> None:
    half = "bfloat16" in name
    for result in found[name]:
        assert "error" not in result, result["error"]
        assert result["in place"]
        assert result["same"], "ranks differ in what both of them have"
        assert not result["not zero"]
        assert result["gradients"] < (0.2 if half else 1e-4), result["worst"]
        assert max(result["logprobs"], result["entropy"], result["logits"]) < (0.2 if half else 1e-4)
