"""What SGLang is started with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from rollplex.errors import ConfigError, EngineError
from rollplex.memory.predict import pool_kv_bytes
from rollplex.protocol.common import Memory, Parallel
from rollplex.protocol.rollout import EngineSpec
from rollplex_rollout.engine import Setup
from rollplex_rollout.sglang.arguments import (
    FORCED_ENVIRONMENT,
    RANKS_ENVIRONMENT,
    SPARE_TOKENS,
    allocator_bytes,
    environment,
    pool_bytes,
    server_arguments,
)

if TYPE_CHECKING:
    from rollout.conftest import Node

SPEC = EngineSpec(
    name="sglang", kv_tokens=10_000, max_running=64, context_tokens=900, prefill_tokens=2048, seed=2**40 + 5
)


def setup_of(node: Node, spec: EngineSpec = SPEC, **changes: Any) -> Setup:
    made = node.setup
    return Setup(
        spec=replace(made.spec, **{"dtype": "bfloat16", "device": Memory.CUDA, **changes}),
        shape=made.shape,
        table=made.table,
        weights=made.weights,
        engine=spec,
        run_dir=None,
    )


def test_on_a_gpu_sizes_are_the_engines_and_nothing_is_loaded_or_listened_to(shared_node: Node) -> None:
    arguments = server_arguments(setup_of(shared_node))
    assert arguments["model_path"] == str(shared_node.folder)
    assert arguments["max_total_tokens"] == 10_000
    assert arguments["max_running_requests"] == 64
    assert arguments["cuda_graph_max_bs_decode"] == 64
    assert arguments["chunked_prefill_size"] == 2048
    assert arguments["context_length"] == 900 + SPARE_TOKENS
    assert arguments["load_format"] == "dummy"
    assert arguments["attention_backend"] == "triton"
    assert arguments["enable_memory_saver"] is True
    assert arguments["disable_radix_cache"] is False
    assert arguments["mm_feature_transport"] == "cpu"
    assert arguments["enable_custom_logit_processor"] is False
    assert 0 <= arguments["random_seed"] < 2**31
    assert "device" not in arguments


def test_on_a_host_it_has_nothing_of_a_gpu(shared_node: Node) -> None:
    arguments = server_arguments(setup_of(shared_node, device=Memory.HOST, dtype="float32"))
    assert arguments["device"] == "cpu"
    assert arguments["attention_backend"] == "torch_native"
    assert "cuda_graph_max_bs_decode" not in arguments
    assert "enable_memory_saver" not in arguments


def test_graphs_are_not_captured_for_more_than_sglangs_own_largest_batch(shared_node: Node) -> None:
    assert server_arguments(setup_of(shared_node, replace(SPEC, max_running=1000)))["cuda_graph_max_bs_decode"] == 256


@pytest.mark.parametrize("name", ["kv_tokens", "max_running", "context_tokens", "prefill_tokens"])
def test_a_size_that_is_missing_is_named(shared_node: Node, name: str) -> None:
    with pytest.raises(EngineError, match=f"{name} = 0"):
        server_arguments(setup_of(shared_node, replace(SPEC, **{name: 0})))


def test_a_pool_smaller_than_one_response_is_refused(shared_node: Node) -> None:
    with pytest.raises(EngineError, match="does not hold one prompt"):
        server_arguments(setup_of(shared_node, replace(SPEC, kv_tokens=900 + SPARE_TOKENS - 1)))
    server_arguments(setup_of(shared_node, replace(SPEC, kv_tokens=900 + SPARE_TOKENS)))


def test_weights_on_a_gpu_must_be_bfloat16(shared_node: Node) -> None:
    with pytest.raises(EngineError, match="bfloat16"):
        server_arguments(setup_of(shared_node, dtype="float32"))


def test_the_allocators_limit_holds_the_pool_and_no_limit_stays_none(shared_node: Node) -> None:
    setup = setup_of(shared_node, replace(SPEC, private_bytes=7))
    shape = shared_node.shape
    pool = pool_kv_bytes(shape, kv_tokens=10_000, dtype="bfloat16")
    assert pool == 10_001 * shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    assert allocator_bytes(setup_of(shared_node)) == 0
    assert allocator_bytes(setup) == 7 + pool
    own = setup_of(shared_node, replace(SPEC, private_bytes=7, own_weights=True))
    assert allocator_bytes(own) == 7 + pool + shared_node.table.total_bytes


def test_messages_between_sglangs_processes_are_not_pickles() -> None:
    assert FORCED_ENVIRONMENT["SGLANG_USE_PICKLE_IPC"] == "0"
    assert "SGLANG_USE_CPU_ENGINE" not in environment(Memory.CUDA)
    assert environment(Memory.HOST)["SGLANG_USE_CPU_ENGINE"] == "1"


def ranks_of(node: Node, parallel: Parallel, spec: EngineSpec = SPEC) -> Setup:
    return dataclasses.replace(setup_of(node, spec), parallel=parallel)


def test_each_rank_of_several_is_a_node_of_sglangs_with_one_gpu(shared_node: Node) -> None:
    for rank in (0, 1):
        parallel = Parallel(training=2, rollout=2, device=rank, rank=rank, meet="unused")
        arguments = server_arguments(ranks_of(shared_node, parallel))
        assert (arguments["tp_size"], arguments["nnodes"], arguments["node_rank"]) == (2, 2, rank)
        assert arguments["disable_custom_all_reduce"] is True
        assert "base_gpu_id" not in arguments
    several = Parallel(training=2, rollout=1, device=1, replica=1, replicas=2, meet="unused")
    assert server_arguments(ranks_of(shared_node, several)) == server_arguments(setup_of(shared_node))


def test_more_ranks_than_trainings_are_refused(shared_node: Node) -> None:
    with pytest.raises(ConfigError, match="parallel.rollout: 2 over parallel.training: 1"):
        server_arguments(ranks_of(shared_node, Parallel(training=1, rollout=2, meet="unused")))


def test_ranks_draw_the_same_and_nothing_multicasts_or_waits_for_its_end() -> None:
    needed = {
        "SYNC_TOKEN_IDS_ACROSS_TP": "1",
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    assert needed.items() <= RANKS_ENVIRONMENT.items()
    assert environment(Memory.CUDA, 2)["NCCL_CUMEM_ENABLE"] == "1"
    assert "NCCL_CUMEM_ENABLE" not in environment(Memory.CUDA)


def test_a_rank_may_take_the_pool_of_its_own_heads(shared_node: Node) -> None:
    spec = replace(SPEC, private_bytes=10**9)
    shape = dataclasses.replace(shared_node.shape, heads=4, kv_heads=2)
    whole = dataclasses.replace(setup_of(shared_node, spec), shape=shape)
    rank = dataclasses.replace(whole, parallel=Parallel(training=2, rollout=2, rank=1, device=1, meet="unused"))
    assert pool_bytes(whole) == 2 * pool_bytes(rank)
    assert allocator_bytes(rank) == 10**9 + pool_bytes(rank)
