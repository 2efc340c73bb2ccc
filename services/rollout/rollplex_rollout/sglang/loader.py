"""SGLang's model loader that loads nothing.

Owns: the class that SGLang's `get_model_loader` is made to return (`scheduler` installs it), for SGLang 0.5.17. It runs
in `ModelRunner.load_model`: before the pool of keys and values is sized, before attention backends, before CUDA graphs
are captured, so that the addresses that all of them see are the segment's.

The module tree is built on the CPU, where its parameters are memory that nobody ever touches; the meta device would
spoil SGLang's cache of rotary tables.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_loader.loader import BaseModelLoader, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype

from rollplex.errors import EngineError, ModelError, RollplexError
from rollplex.memory.tensors import DTYPES
from rollplex.protocol.common import Memory
from rollplex_rollout.sglang import tower, wire
from rollplex_rollout.sglang.aliasing import alias, copy, named, own_logits
from rollplex_rollout.sglang.pixels import Pixels
from rollplex_rollout.sglang.serving import Taken, WeightsServer, take
from rollplex_rollout.sglang.shares import limit_decoding


class MappedLoader(BaseModelLoader):  # type: ignore[misc]
    """Builds the model over the segment that the rollout process offers."""

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """The model, each of its parameters a view of the segment; reports them to the rollout process.

        Raises:
            RollplexError: the rollout process has been told the same.
        """
        taken = take(Path(os.environ[wire.SOCKET_VARIABLE]))
        try:
            limit_allocator(taken.offer)
            if taken.offer.memory is Memory.CUDA:
                limit_decoding(taken.offer.decode_share, taken.offer.run_dir)
            model, offsets = self._build(taken, model_config, torch.device(device_config.device))
            pixels = pixels_of(taken, model)
        except RollplexError as error:
            taken.refuse(error)
            raise
        wire.tell(taken.sock, wire.Mapped(offsets=offsets))
        WeightsServer(taken, lambda: named(model), pixels.open).start()
        return model

    def _build(self, taken: Taken, model_config: Any, device: torch.device) -> tuple[torch.nn.Module, dict[str, int]]:
        offer = taken.offer
        if device.type != {Memory.HOST: "cpu", Memory.CUDA: "cuda"}[offer.memory]:
            raise ModelError("The weights are in another memory than SGLang computes in", got=f"{device}")
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
            model: torch.nn.Module = _initialize_model(model_config, self.load_config, None)
        offsets = (copy if offer.own_weights else alias)(model, taken.mapping, taken.places)
        where = next(model.parameters()).device
        logits = model.get_submodule("logits_processor")
        if offer.parallel.rollout > 1:
            gather_plainly(logits)
        own_logits(logits, never_sampled=offer.never_sampled, vocab=taken.shape.vocab, device=where)
        return model.eval(), offsets


def pixels_of(taken: Taken, model: Any) -> Pixels:
    """Where the model takes its pictures from from here on.

    Raises:
        EngineError: SGLang's model is not built as that of 0.5.17 is.
    """
    pixels = Pixels(
        row_width=taken.shape.row_width, dtype=DTYPES[taken.offer.dtype], device=next(model.parameters()).device
    )
    tower.lend(model, pixels)
    tower.keep_tables(model.visual)
    return pixels


def gather_plainly(logits_processor: Any) -> None:
    """Gather the ranks' logits as everything else is: SGLang would first try multicast over NVLink.

    Raises:
        EngineError: SGLang is not built as 0.5.17 is.
    """
    gatherer: Any = getattr(logits_processor, "_logits_gatherer", None)
    if not hasattr(gatherer, "_state"):
        raise EngineError(
            "SGLang's way to gather logits is not known", got="no _logits_gatherer", needed="SGLang 0.5.17"
        )
    gatherer._state = None  # noqa: SLF001 - its own word for it; there is no argument


def limit_allocator(offer: wire.Offer) -> None:
    """Keep the private memory of this process within what was offered: torch raises instead of taking more."""
    if offer.memory is Memory.CUDA and offer.allocator_bytes:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, offer.allocator_bytes / total))
