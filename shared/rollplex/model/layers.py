"""Keeping the inputs of layers instead of everything inside them; each layer's forward runs again in its backward.

Owns: which modules that is done for, and that it is done for one forward only. K and V of a layer leave it by the
context of the pass (`rollplex.model.attention`), so they stay in the graph; when the layer runs again the context must
take no others. transformers' own checkpointing is not used: it drops what leaves a layer by another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rollplex.model.build import Model


@contextmanager
def inputs_kept(model: Model) -> Iterator[None]:
    """Inside, forwards of the language model's layers and the vision tower's blocks keep their inputs alone."""
    language_model: Any = model.model.language_model
    visual: Any = model.model.visual
    modules = [*language_model.layers, *visual.blocks]
    for module in modules:
        module.forward = _again(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's own is there again


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # a frozen tower
            return forward(*args, **kwargs)
        # There is no dropout, so no state of a random generator to put back.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
