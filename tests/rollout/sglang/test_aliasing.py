"""Parameters of a module tree that become the segment's bytes, and the account of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from rollplex.errors import EngineError, ModelError, SegmentError
from rollplex.layout.parameters import ParameterTable
from rollplex.memory.tensors import require_mapped, views
from rollplex.model.head import output_logits
from rollplex_rollout.sglang.aliasing import alias, copy, named, never_sample, own_logits, renew, require_copies
from rollplex_rollout.sglang.places import whole

if TYPE_CHECKING:
    from rollout.conftest import Node


def tree(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module tree with parameters of these dotted names."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
    return root


def shapes_of(table: ParameterTable) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.shape for entry in table.entries}


def test_every_parameter_becomes_the_segments_bytes_and_says_where(node: Node) -> None:
    model = tree(shapes_of(node.table))
    objects = dict(model.named_parameters())
    offsets = alias(model, node.actor, whole(node.table))
    assert offsets == {entry.name: entry.offset for entry in node.table.entries}
    require_mapped(node.actor, named(model))
    assert all(dict(model.named_parameters())[name] is value for name, value in objects.items()), "the same objects"
    name = node.table.entries[3].name
    views(node.actor, node.table)[name].fill_(3.5)
    assert bool((objects[name] == 3.5).all()), "a write into the segment is seen"


def test_what_is_tied_stays_tied_and_buffers_stay_buffers(node: Node) -> None:
    model = tree(shapes_of(node.table))
    first = node.table.entries[0].name
    head = nn.Module()
    head.register_parameter("again", model.get_parameter(first))
    head.register_buffer("table", torch.arange(4.0), persistent=False)
    model.add_module("head", head)
    alias(model, node.actor, whole(node.table))
    again: Tensor = model.get_parameter("head.again")
    assert again is model.get_parameter(first)
    assert "head.again" in named(model)
    assert dict(model.named_buffers())["head.table"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert "head.table" not in model.state_dict()


def test_an_engine_with_weights_of_its_own_has_copies_that_are_renewed(node: Node) -> None:
    model = tree(shapes_of(node.table))
    assert copy(model, node.actor, whole(node.table)) == {entry.name: entry.offset for entry in node.table.entries}
    parameters = named(model)
    require_copies(parameters, node.actor, whole(node.table))
    name = node.table.entries[3].name
    views(node.actor, node.table)[name].fill_(3.5)
    with pytest.raises(SegmentError, match="not a copy"):
        require_copies(parameters, node.actor, whole(node.table))
    renew(parameters, node.actor, whole(node.table))
    require_copies(parameters, node.actor, whole(node.table))
    assert bool((model.get_parameter(name) == 3.5).all())


def test_missing_surplus_and_different_parameters_are_all_listed_and_nothing_is_changed(node: Node) -> None:
    shapes = shapes_of(node.table)
    names = list(shapes)
    del shapes[names[0]]
    shapes[names[1]] = (1, *shapes[names[1]])
    shapes["lora.weight"] = (2, 2)
    model = tree(shapes)
    before = model.get_parameter(names[2]).data_ptr()
    with pytest.raises(ModelError) as caught:
        alias(model, node.actor, whole(node.table))
    for part in (f"1 missing: {names[0]}", "1 surplus: lora.weight", f"1 different: {names[1]}"):
        assert part in caught.value.got
    assert model.get_parameter(names[2]).data_ptr() == before


def test_another_dtype_is_different(node: Node) -> None:
    with pytest.raises(ModelError, match="bfloat16 instead of"):
        alias(tree(shapes_of(node.table), torch.bfloat16), node.actor, whole(node.table))


def test_a_parameter_that_somebody_replaced_is_found(node: Node) -> None:
    model = tree(shapes_of(node.table))
    alias(model, node.actor, whole(node.table))
    name = node.table.entries[2].name
    value = model.get_parameter(name)
    value.data = value.data.clone()
    with pytest.raises(SegmentError, match="storage of its own"):
        require_mapped(node.actor, named(model))


class Logits(nn.Module):
    """As SGLang's LogitsProcessor: gives an object that holds the logits."""

    def forward(self, logits: Tensor | None) -> Any:
        return SimpleNamespace(next_token_logits=logits)


class Makes(nn.Module):
    """Makes logits where SGLang's LogitsProcessor does."""

    def forward(self, hidden: Tensor, head: nn.Module, bias: Tensor | None = None) -> Any:
        return SimpleNamespace(next_token_logits=self._compute_lm_head(hidden, head, bias))

    def _compute_lm_head(self, hidden: Tensor, head: Any, bias: Tensor | None = None) -> Tensor:
        made: Tensor = hidden @ head.weight.t()
        return made


def test_logits_are_the_trainers_and_not_rounded_to_the_dtype_of_the_weights() -> None:
    module, head = Makes(), nn.Linear(6, 11, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(3, 6).bfloat16()
    rounded = module(hidden, head).next_token_logits.float()
    own_logits(module, never_sampled=(1, 3), vocab=11, device=torch.device("cpu"))
    with torch.inference_mode():
        made = module(hidden, head).next_token_logits
        assert torch.isneginf(made[:, [1, 3]]).all()
        others = [id_ for id_ in range(11) if id_ not in {1, 3}]
        assert torch.equal(made[:, others], output_logits(hidden, head.weight)[:, others])
        assert not torch.equal(made[:, others], rounded[:, others])
        with pytest.raises(EngineError, match="output layer has a bias"):
            module(hidden, head, torch.zeros(11))


def test_a_module_that_makes_no_logits_that_way_is_refused() -> None:
    with pytest.raises(EngineError, match="no _compute_lm_head"):
        own_logits(Logits(), never_sampled=(), vocab=5, device=torch.device("cpu"))


def test_ids_that_are_never_sampled_are_outside_the_softmax() -> None:
    module = Logits()
    never_sample(module, (1, 3, 900), vocab=5, device=torch.device("cpu"))
    out = module(torch.zeros(2, 5)).next_token_logits.log_softmax(-1)
    assert out[0, 0] == pytest.approx(-torch.log(torch.tensor(3.0)).item())
    assert torch.isneginf(out[:, [1, 3]]).all()
    assert module(None).next_token_logits is None
