"""How an engine comes up: SGLang with the weights mapped, and what it is refused for.

Owns: the order of a start, and the checks that SGLang became what was asked for. Each rank of several starts its own
part, which find each other; rank 0 leads (`engine`), the others follow (`following`).

    meet the other ranks ▸ start SGLang ▸ offer the segment ▸ check where parameters lie, and sizes ▸ rest
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final

from rollplex.errors import EngineError
from rollplex.model.parallel.group import meet
from rollplex.protocol.common import Memory, Parallel
from rollplex_rollout.engine import Engine, Setup
from rollplex_rollout.sglang import wire
from rollplex_rollout.sglang.arguments import (
    FORCED_ENVIRONMENT,
    RANKS_ENVIRONMENT,
    allocator_bytes,
    environment,
    server_arguments,
)
from rollplex_rollout.sglang.engine import SglangEngine
from rollplex_rollout.sglang.following import FollowingEngine
from rollplex_rollout.sglang.places import places
from rollplex_rollout.sglang.ranks import Rounds
from rollplex_rollout.sglang.remote import RemoteMapping
from rollplex_rollout.sglang.runtime import LOAD_DEADLINE_S, SglangRuntime, make_folder

OWN_WEIGHTS_GB: Final = 0.05
"""What SGLang counts as weights of its own if it has none: buffers."""

log = logging.getLogger("rollplex.rollout.sglang")


def start(setup: Setup) -> Engine:
    """Start SGLang over the segment; returns when it can sample.

    Raises:
        EngineError: SGLang is not installed, did not start, or is not what was asked for.
        ModelError: its model has other parameters than the segment.
        SegmentError: the segment cannot be mapped.
        ConfigError: ranks that SGLang's engine does not have.
        WaitError: another rank has not come.
    """
    arguments = server_arguments(setup)
    several = setup.parallel.rollout > 1
    os.environ.update(FORCED_ENVIRONMENT)
    if several:
        os.environ.update(RANKS_ENVIRONMENT)
    for name, value in environment(setup.spec.device, setup.parallel.rollout).items():
        os.environ.setdefault(name, value)
    runtime = SglangRuntime(make_folder(setup.run_dir), meeting_file(setup.parallel) if several else None)
    try:
        if not several:
            return SglangEngine(setup, runtime, *_up(setup, arguments, runtime))
        line = _met(setup.parallel, runtime)
        with line.failing():
            parts = _up(setup, arguments, runtime)
            kind = FollowingEngine if setup.parallel.rank else SglangEngine
            return kind(setup, runtime, *parts, line)
    except BaseException:
        runtime.close()
        raise


def meeting_file(parallel: Parallel) -> Path:
    """By which the scheduler processes of one engine find each other. All its ranks know it, no other engine does."""
    return Path(f"{parallel.meet}.sglang.{parallel.replica}")


def _met(parallel: Parallel, runtime: SglangRuntime) -> Rounds:
    """This process's line to the others of its engine."""
    if parallel.rank == 0:
        meeting_file(parallel).unlink(missing_ok=True)  # of a run that was killed; nobody uses it before all have met
    return Rounds(meet(parallel, parallel.rollout).tensor, runtime.require_alive, parallel.collective_s)


def _up(setup: Setup, arguments: dict[str, Any], runtime: SglangRuntime) -> tuple[Any, RemoteMapping]:
    """The connection to this rank's scheduler process, and the weights as they can be read through it."""
    remote, offsets = runtime.start(
        arguments,
        lambda link: link.offer(_offer(setup), setup.weights.descriptor(), LOAD_DEADLINE_S),
    )
    require_offsets(setup, offsets)
    require_sizes(setup, runtime.info())
    runtime.leave_pixels(setup.shape)
    ref = setup.weights.ref
    return remote, RemoteMapping(remote, ref.size_bytes, ref.memory)


def require_offsets(setup: Setup, offsets: dict[str, int]) -> None:
    """Whether SGLang's parameters lie where the table says: without this report it may serve random weights, since it
    goes on when a hook of ours fails.

    Raises:
        EngineError: a parameter lies elsewhere, or there are others.
    """
    needed = places(setup.table, setup.shape, setup.parallel).offsets
    if offsets != needed:
        wrong = sorted(name for name in needed.keys() | offsets.keys() if needed.get(name) != offsets.get(name))
        raise EngineError(
            "SGLang's parameters do not lie where the weights are",
            got=f"{len(wrong)} elsewhere, such as {wrong[0]} at {offsets.get(wrong[0])}",
            needed=f"{needed.get(wrong[0])}",
        )


def require_sizes(setup: Setup, info: dict[str, Any]) -> None:
    """Whether SGLang made the pool that was planned.

    What it counts as weights is only told: it is how much less memory was free after loading than before, to which
    other processes that start at the same time add theirs. That it holds none is known from `require_offsets`.

    Raises:
        EngineError: it did not.
    """
    tokens = info["max_total_num_tokens"]
    if tokens != setup.engine.kv_tokens:
        raise EngineError(
            "SGLang made another pool of keys and values than it was told to",
            got=f"{tokens} tokens",
            needed=f"{setup.engine.kv_tokens}",
            do="Lower rollout.sglang.kv_tokens, or free memory on the GPU.",
        )
    weights_gb = float(info.get("memory_usage", {}).get("weight") or 0.0)
    mapped = setup.spec.device is Memory.CUDA and not setup.engine.own_weights
    if mapped and weights_gb > OWN_WEIGHTS_GB:
        log.warning("while SGLang mapped the weights, %.2f GB of the GPU's memory went to others", weights_gb)


def _offer(setup: Setup) -> wire.Offer:
    spec, ref = setup.spec, setup.weights.ref
    return wire.Offer(
        memory=ref.memory,
        size_bytes=ref.size_bytes,
        path=spec.path,
        dtype=spec.dtype,
        freeze_vision=spec.freeze_vision,
        table_hash=setup.table.hash,
        never_sampled=spec.never_sampled,
        parallel=setup.parallel,
        allocator_bytes=allocator_bytes(setup),
        decode_share=setup.engine.decode_share,
        run_dir="" if setup.run_dir is None else str(setup.run_dir),
        own_weights=setup.engine.own_weights,
    )
