"""What SGLang's engine is started with.

Owns the values and their reasons, for SGLang 0.5.17. Pure: imports neither SGLang nor torch.

The two sizes that decide how much memory it takes are exact: `max_total_tokens` is the pool, and `mem_fraction_static`
is only large enough not to lower it (SGLang sizes the pool by what is free, then takes the smaller of the two).
"""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from typing import Any, Final

from rollplex.errors import ConfigError, EngineError
from rollplex.layout.parallel.degrees import RolloutLayout
from rollplex.layout.parallel.rank import rank_shape
from rollplex.memory.predict import pool_kv_bytes
from rollplex.multicast import NO_MULTICAST
from rollplex.protocol.common import Memory, Parallel
from rollplex.protocol.rollout import EngineSpec
from rollplex_rollout.engine import Setup

MAX_GRAPH_BATCH: Final = 256
"""Largest decode batch that gets a CUDA graph: SGLang's own limit on this GPU; each graph costs start-up time."""
SPARE_TOKENS: Final = 8
"""SGLang keeps a few tokens of context and pool back and shortens what does not fit without a word."""
GPU_SHARE: Final = 0.95
"""Of the memory that is free when the engine starts; see above."""
HOST_SHARE: Final = 0.1
_MAX_SEED: Final = 2**31


def server_arguments(setup: Setup) -> dict[str, Any]:
    """Fields of SGLang's ServerArgs.

    Raises:
        EngineError: a size is missing, or the weights have a dtype that SGLang does not compute with.
    """
    spec = setup.engine
    require_sizes(spec)
    if setup.spec.device is Memory.CUDA and setup.spec.dtype != "bfloat16":
        raise EngineError(
            "SGLang's engine is used with bfloat16 weights on a GPU",
            got=setup.spec.dtype,
            needed="bfloat16",
            do="Set model.dtype to bfloat16, or rollout.engine to transformers.",
        )
    arguments: dict[str, Any] = {
        "model_path": setup.spec.path,
        "dtype": setup.spec.dtype,
        "load_format": "dummy",  # no weights are read: the loader maps them
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mm_feature_transport": "cpu",  # the alternative makes a CUDA context in the rollout process
        "context_length": spec.context_tokens + SPARE_TOKENS,
        "max_total_tokens": spec.kv_tokens,
        "max_running_requests": spec.max_running,
        "chunked_prefill_size": spec.prefill_tokens,
        "random_seed": spec.seed % _MAX_SEED,
        "log_level": "warning",
        "trust_remote_code": False,
        "enable_custom_logit_processor": False,
        "disable_radix_cache": False,  # the responses of a prompt share its keys and values
    }
    arguments |= _cuda(spec) if setup.spec.device is Memory.CUDA else _host()
    return arguments | _ranks(setup.parallel)


def _ranks(parallel: Parallel) -> dict[str, Any]:
    """Of one rank of several: each process starts what SGLang calls a node, with one scheduler process on the one GPU
    that it sees. They meet by the file that `runtime` names.

    Raises:
        ConfigError: the segment is not planned for an engine that takes each parameter as one tensor.
    """
    if parallel.rollout == 1:
        return {}
    if parallel.rollout > parallel.training:
        raise ConfigError(
            "SGLang's engine has no more ranks than training where both use the same devices",
            got=f"parallel.rollout: {parallel.rollout} over parallel.training: {parallel.training}",
            needed="parallel.rollout of at most parallel.training",
            do="Lower parallel.rollout, raise parallel.training, or set rollout.engine to transformers.",
            where="parallel.rollout",
        )
    return {
        "tp_size": parallel.rollout,
        "nnodes": parallel.rollout,
        "node_rank": parallel.rank,
        "sleep_on_idle": True,  # else every rank's scheduler process would turn in circles between two units
        "disable_custom_all_reduce": True,  # of a process that sees one GPU
    }


def _cuda(spec: EngineSpec) -> dict[str, Any]:
    return {
        "attention_backend": "triton",
        "mm_attention_backend": "triton_attn",
        "disable_flashinfer_autotune": True,
        "mem_fraction_static": GPU_SHARE,
        "cuda_graph_max_bs_decode": min(spec.max_running, MAX_GRAPH_BATCH),
        "enable_memory_saver": True,
        "disable_custom_all_reduce": True,
    }


def _host() -> dict[str, Any]:
    return {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": HOST_SHARE}


RANKS_ENVIRONMENT: Final = {
    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",  # ranks without a tokenizer must not wait for the end of theirs
    "SYNC_TOKEN_IDS_ACROSS_TP": "1",  # one rank that draws another token would leave the others' batches for good
    "SGLANG_SYNC_TOKEN_IDS_ACROSS_TP": "1",
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",  # not needed; it would listen on every address
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # how much of each GPU is free now says nothing: sizes are planned
    **NO_MULTICAST,  # which SGLang would try for logits
}
"""Besides, where an engine has several ranks."""


def environment(device: Memory, ranks: int = 1) -> MappingOf[str, str]:
    """What SGLang reads from the environment, before it is imported; values that are there already stay, but for those
    that decide what is trusted."""
    values = {
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "TORCHDYNAMO_DISABLE": "1",  # small torch.compile helpers cost seconds each at first use
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if ranks > 1:
        values["NCCL_CUMEM_ENABLE"] = "1"  # SGLang would switch off how processes reach a GPU that they do not see
    return values | ({} if device is Memory.CUDA else {"SGLANG_USE_CPU_ENGINE": "1"})


FORCED_ENVIRONMENT: Final = {
    "SGLANG_USE_PICKLE_IPC": "0",  # typed messages between its processes instead of pickles
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probabilities after division by the temperature
    "SGLANG_SANITIZE_NAN_LOGITS": "0",  # logits that are no numbers must not become tokens
    "GLOO_SOCKET_IFNAME": "lo",  # torch.distributed listens even where there is one rank: on loopback alone
    "NCCL_SOCKET_IFNAME": "lo",
}


def require_sizes(spec: EngineSpec) -> None:
    """Raise EngineError unless every size is there and they fit each other."""
    for name in ("kv_tokens", "max_running", "context_tokens", "prefill_tokens"):
        if getattr(spec, name) < 1:
            raise EngineError("SGLang's engine was not told a size", got=f"{name} = 0", needed="1 or more")
    if spec.kv_tokens < spec.context_tokens + SPARE_TOKENS:
        raise EngineError(
            "The pool of keys and values does not hold one prompt with its response",
            got=f"{spec.kv_tokens} tokens",
            needed=f"{spec.context_tokens + SPARE_TOKENS}",
            do="Raise rollout.sglang.kv_tokens, or lower rollout.max_new_tokens.",
        )


def allocator_bytes(setup: Setup) -> int:
    """What the scheduler process's allocator may hold: its private memory, the pool, and weights of its own if it has
    any; 0 is no limit."""
    spec = setup.engine
    if not spec.private_bytes:
        return 0
    own = setup.table.total_bytes if spec.own_weights else 0  # which several devices are refused
    return spec.private_bytes + own + pool_bytes(setup)


def pool_bytes(setup: Setup) -> int:
    """Keys and values of the pool, of a rank's share of the heads."""
    shape = rank_shape(setup.shape, RolloutLayout(degree=setup.parallel.rollout))
    return pool_kv_bytes(shape, kv_tokens=setup.engine.kv_tokens, dtype=setup.spec.dtype)
