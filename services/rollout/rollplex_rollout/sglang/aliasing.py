"""Making the parameters of SGLang's model be the bytes of the segment.

Owns: the account of every parameter, one by one, and what is done to the module tree. Knows torch, but not SGLang:
any module tree will do.

A parameter is a view of the segment (`rollplex_rollout.sglang.places`) and nothing is converted. `Parameter.data` is
pointed at the view: the object, its attributes and what is tied to it stay.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from rollplex.errors import EngineError, ModelError, SegmentError
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import DTYPES, require_mapped, tensor
from rollplex.model.head import output_logits
from rollplex_rollout.sglang.places import Places

_MOST_NAMES: Final = 8
"""Of each kind that an error lists."""


def copy(model: nn.Module, mapping: Mapping, places: Places) -> dict[str, int]:
    """Instead of `alias`: give every parameter a copy of its bytes. For comparison with engines that hold weights of
    their own.

    Returns:
        Offset in the segment of what every parameter is a copy of.

    Raises:
        As `alias`.
    """
    offsets = alias(model, mapping, places)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return offsets


def renew(parameters: MappingOf[str, Tensor], mapping: Mapping, places: Places) -> None:
    """Copy the segment's parameters into those of `copy`; over when this returns."""
    with torch.no_grad():
        for name, stored in views(mapping, places).items():
            parameters[name].copy_(stored)
    _wait(mapping)


def require_copies(parameters: MappingOf[str, Tensor], mapping: Mapping, places: Places) -> None:
    """Raise SegmentError unless every parameter has the segment's bytes."""
    for name, stored in views(mapping, places).items():
        if not torch.equal(parameters[name].view(torch.uint8), stored.view(torch.uint8)):
            raise SegmentError(
                "A parameter is not a copy of the weights any more",
                got="other bytes",
                needed="those of the segment",
                where=name,
            )


def _wait(mapping: Mapping) -> None:
    if tensor(mapping, 0, (1,), torch.uint8).is_cuda:
        torch.cuda.synchronize()


def views(mapping: Mapping, places: Places) -> dict[str, Tensor]:
    """Every parameter of a rank as a view of its segment, by SGLang's name. Rows of what is split by columns may lie
    further apart than they are long.

    Raises:
        SegmentError: the segment is too small.
    """
    dtype = DTYPES[places.dtype]
    return {
        at.name: tensor(mapping, at.offset, (at.span,), dtype).as_strided(at.shape, at.strides)
        for at in places.parameters
    }


def alias(model: nn.Module, mapping: Mapping, places: Places) -> dict[str, int]:
    """Point every parameter at its bytes in the segment, and move the buffers to where the segment is.

    Returns:
        Offset in the segment of every parameter, read back from its address.

    Raises:
        ModelError: the model's parameters are not those of `places`; names what is missing, surplus or of another
            shape or dtype. Nothing has been changed.
        SegmentError: the segment is too small, or a parameter did not become a view.
    """
    parameters = dict(model.named_parameters())
    require_same(places, {name: (tuple(value.shape), value.dtype) for name, value in parameters.items()})
    stored = views(mapping, places)
    for name, parameter in parameters.items():
        parameter.data = stored[name]
    start = tensor(mapping, 0, (1,), torch.uint8)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(start.device))
    require_mapped(mapping, named(model))
    return {name: parameter.data_ptr() - start.data_ptr() for name, parameter in parameters.items()}


def named(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by every name that it has, tied ones too."""
    return dict(model.named_parameters(remove_duplicate=False))


def require_same(places: Places, found: MappingOf[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Raise ModelError unless the names, shapes and dtypes are exactly those of `places`."""
    dtype = DTYPES[places.dtype]
    needed = {at.name: (at.shape, dtype) for at in places.parameters}
    missing = [name for name in needed if name not in found]
    surplus = [name for name in found if name not in needed]
    other = [
        f"{name} {list(found[name][0])} {found[name][1]} instead of {list(needed[name][0])} {dtype}"
        for name in needed
        if name in found and found[name] != needed[name]
    ]
    if missing or surplus or other:
        parts = (("missing", missing), ("surplus", surplus), ("different", other))
        raise ModelError(
            "SGLang's model has other parameters than the segment",
            got="; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in parts if names),
            needed=f"the {len(needed)} parameters of the rank's table",
            do="Use the version of SGLang that the optional dependency `sglang` names.",
        )


def own_logits(logits_processor: Any, *, never_sampled: Sequence[int], vocab: int, device: torch.device) -> None:
    """Let logits be those of the one definition of log-probability: made as the trainer makes them, without the ids
    that are never sampled.

    Raises:
        EngineError: SGLang is not built as 0.5.17 is.
    """
    widen(logits_processor)
    never_sample(logits_processor, never_sampled, vocab, device)


def widen(logits_processor: Any) -> None:
    """Make logits as the trainer does: float32, from half-precision weights too. SGLang's own option for it copies the
    whole output layer to float32 at every step.

    Raises:
        EngineError: SGLang is not built as 0.5.17 is.
    """
    if not callable(getattr(logits_processor, "_compute_lm_head", None)):
        raise EngineError("SGLang's way to make logits is not known", got="no _compute_lm_head", needed="SGLang 0.5.17")

    def compute(hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None) -> Tensor:
        if embedding_bias is not None:
            raise EngineError("SGLang's output layer has a bias", needed="none, as the trainer's has none")
        return output_logits(hidden_states.to(lm_head.weight.dtype), lm_head.weight)

    logits_processor._compute_lm_head = compute  # noqa: SLF001 - there is no argument for it


def never_sample(logits_processor: nn.Module, ids: Sequence[int], vocab: int, device: torch.device) -> None:
    """Put the logits of `ids` to minus infinity as they come out of the model: such ids are outside every softmax, and
    are drawn by no sampler.

    Done here because it is the same for every request: SGLang's `logit_bias` would keep a float32 [batch, vocab] for
    it, fill it id by id, and copy it whenever the batch changes. What is done here is also part of the CUDA graphs.
    """
    inside = torch.tensor([token for token in ids if 0 <= token < vocab], dtype=torch.int64, device=device)
    if not inside.numel():
        return

    def mask(_module: nn.Module, _args: Any, output: Any) -> None:
        if output.next_token_logits is not None:
            output.next_token_logits.index_fill_(-1, inside, -torch.inf)

    logits_processor.register_forward_hook(mask)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
