"""What runs in SGLang's scheduler process, for SGLang 0.5.17.

Owns: the entry function of that process, and what is added to its Scheduler for the rollout process to call between
two steps of its event loop (`Engine.collective_rpc`, which returns no values: what went wrong comes back as text).

Runs before the model is there: `run_scheduler`. A share of the GPU's multiprocessors (`shares`) is set up where the
loader has the offer and nothing is captured yet: `loader.MappedLoader.load_model`.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from rollplex_rollout.sglang import leftovers, wire
from rollplex_rollout.sglang.hooks import BEGIN, BUSY, PLACE, REST, TOGETHER, has_pictures, prompt_of
from rollplex_rollout.sglang.pixels import Pixels, Place
from rollplex_rollout.sglang.positions import POSITIONS, at_once
from rollplex_rollout.sglang.tower import PIXELS

LOADER: Final = "sglang.srt.model_loader.loader.get_model_loader"
ARRIVAL: Final = "sglang.srt.managers.scheduler.Scheduler.handle_generate_request"
_PICTURES: Final = "rollplex_pictures"
_THREAD_SWITCH_S: Final = 0.0005
MAX_REASON_BYTES: Final = 1000
"""The thread that reads headers must not wait 5 ms for the interpreter."""


def run_scheduler(server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of SGLang's `run_scheduler_process`, which it ends in."""
    from sglang.srt.managers import scheduler  # noqa: PLC0415 - after the fork of modules that hooks repair
    from sglang.srt.managers.load_snapshot import shm_path_for  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    sys.setswitchinterval(_THREAD_SWITCH_S)
    HookRegistry.register(LOADER, mapped_loader, HookType.AROUND)
    HookRegistry.register(ARRIVAL, with_pictures, HookType.AROUND)
    HookRegistry.register(POSITIONS, at_once, HookType.AROUND)
    setattr(scheduler.Scheduler, BEGIN, begin)
    setattr(scheduler.Scheduler, REST, rest)
    setattr(scheduler.Scheduler, TOGETHER, together)
    leftovers.note(Path(os.environ[wire.SOCKET_VARIABLE]).parent, Path(shm_path_for(port_args.instance_id)))
    return scheduler.run_scheduler_process(server_args, port_args, *args, **kwargs)


def mapped_loader(_original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:  # noqa: ARG001
    """The loader that maps the weights, whatever was asked for."""
    from rollplex_rollout.sglang.loader import MappedLoader  # noqa: PLC0415 - imports SGLang's loaders

    return MappedLoader(load_config)


def with_pictures(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """A prompt's first request tells of its pictures; here the others are told, too, so that all are the same prompt to
    the radix tree, and one that has lost its place there can be read again. The tower will want their pixels.

    Args:
        original: SGLang's own.
        self: the Scheduler.
        request: a TokenizedGenerateReqInput.
    """
    if has_pictures(request.rid):
        prompt = prompt_of(request.rid)
        kept: dict[str, Any] = self.__dict__.setdefault(_PICTURES, {})
        if request.mm_inputs is not None:
            kept[prompt] = _copied(request.mm_inputs)
            for item in request.mm_inputs.mm_items:
                _pixels(self).expect(Place(*item.model_specific_data[PLACE]))
        elif prompt not in kept:
            raise RuntimeError(f"request {request.rid} came before the one that brings its pictures")
        else:
            request.mm_inputs = _copied(kept[prompt])
    return original(self, request)


def _copied(pictures: Any) -> Any:
    """The same tensors under objects of their own: SGLang writes into them."""
    own = copy.copy(pictures)
    own.mm_items = [copy.copy(item) for item in pictures.mm_items]
    return own


def _pixels(scheduler: Any) -> Pixels:
    found: Pixels = getattr(scheduler.tp_worker.model_runner.model, PIXELS)
    return found


def agreed(call: Callable[..., None]) -> Callable[..., None]:
    """A call that fails on all ranks if it fails on one: SGLang makes it on each, and answers for rank 0 alone."""

    @wraps(call)
    def everywhere(scheduler: Any, *args: Any, **parameters: Any) -> None:
        ps = scheduler.ps
        if ps.tp_size == 1:
            call(scheduler, *args, **parameters)
            return
        reason = ""
        try:
            call(scheduler, *args, **parameters)
        except Exception as error:  # noqa: BLE001 - said by rank 0, wherever it was raised
            reason = str(error) or type(error).__name__
        reasons = _said_by_all(reason, ps.tp_size, scheduler.tp_cpu_group)
        rank, found = next(((rank, one) for rank, one in enumerate(reasons) if one), (0, ""))
        if found:
            raise RuntimeError(found if found == BUSY else f"rank {rank}: {found}")

    return everywhere


def _said_by_all(reason: str, ranks: int, group: Any) -> list[str]:
    """By rank; each is cut where it is too long."""
    own = torch.zeros(MAX_REASON_BYTES, dtype=torch.uint8)
    words = reason.encode()[:MAX_REASON_BYTES]
    if words:
        own[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(every, own, group=group)
    return [bytes(one.numpy()).rstrip(b"\0").decode(errors="replace") for one in every]


@agreed
def begin(self: Any, seed: int) -> None:
    """Before a unit: draws depend on the unit, not on what came before it, and only the unit's own ids end a response.

    Args:
        self: the Scheduler.
        seed: of torch's generators.
    """
    _require_idle(self)
    self.model_config.hf_eos_token_id = None
    # Where requests keep their tokens' places in the pool; rows of a graph that no request has read its first one. It
    # lies in the memory that was given back and taken again, which may hold anything.
    self.req_to_token_pool.req_to_token.zero_()
    torch.manual_seed(seed)


def together(self: Any) -> None:
    """Nothing; but all ranks have carried out what they were told before when SGLang answers.

    Args:
        self: the Scheduler.
    """
    del self


@agreed
def rest(self: Any) -> None:
    """Nothing of this engine runs on the GPU, and nothing that depends on the weights is kept: neither keys and values
    nor encoded pictures. The unit's inputs are let go.

    Args:
        self: the Scheduler.
    """
    from sglang.srt.managers import mm_utils  # noqa: PLC0415

    _require_idle(self)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if not self.flush_cache():
        raise RuntimeError("SGLang did not empty its cache of keys and values")
    self.__dict__.pop(_PICTURES, None)
    _pixels(self).close()
    if mm_utils.embedding_cache is not None:
        mm_utils.embedding_cache.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the unit's lease ends: what it worked with is others' to be granted
        torch._C._host_emptyCache()  # noqa: SLF001 - as torch's own graphs do; pinned memory, of pixels above all


def _require_idle(scheduler: Any) -> None:
    if not scheduler.is_fully_idle():
        raise RuntimeError(BUSY)
