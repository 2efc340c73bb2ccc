"""Split against unsplit: the prefix once and the suffix per response equal a full forward of each sample alone.

The reference is transformers' own model, opened with from_pretrained, with its own positions and attention, each sample
by itself and without padding. Metric: max|a-b| / max(max|b|, 1e-3 * the model's largest gradient), per parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.model import suffix
from rollplex.model.prefix import PrefixState, prefix_backward, prefix_forward
from rollplex.model.suffix import suffix_forward

CASES: dict[str, list[list[Any]]] = {
    "text": [[11]],
    "image": [[3, ("image", (1, 4, 6)), 4]],
    "images": [[2, ("image", (1, 4, 4)), ("image", (1, 6, 8)), 3, ("image", (1, 2, 2)), 2]],
    "video": [[2, ("video", (3, 4, 4), 1.5), 5]],
    "mixed": [
        [5],
        [2, ("image", (1, 4, 6)), 3],
        [1, ("video", (2, 4, 4), 0.5), 2, ("image", (1, 4, 4)), 4],
        [19],
    ],
}
SAMPLES = 3
LENGTHS = (4, 1, 6)
TEMPERATURE = 0.9
ENTROPY = 0.3


@dataclass(frozen=True)
class Problem:
    """Prompts, their responses, and a weight for each response token in the loss."""

    samples: list[Any]
    tokens: Tensor
    lengths: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Result:
    logprobs: Tensor
    entropy: Tensor
    grads: dict[str, Tensor]


Sabotage = Callable[[PrefixState], PrefixState]


def problem(kit: Any, case: str, dtype: str, name: str = "tiny") -> Problem:
    samples = [kit.sample(parts, seed, name) for seed, parts in enumerate(CASES[case])]
    tokens, lengths = kit.responses(LENGTHS * len(samples), 7)
    generator = torch.Generator().manual_seed(3)
    return Problem(
        samples, tokens, lengths, torch.randn(tokens.shape, generator=generator, dtype=getattr(torch, dtype))
    )


def split(kit: Any, store: Any, given: Problem, *, copies: int = 1, sabotage: Sabotage | None = None) -> Result:
    """Through prefix, suffix and prefix backward, the way the two services do it."""
    store.zero()
    model = store.model
    state = prefix_forward(model, kit.batch(given.samples, copies), grad=True)
    leaves: Any = kit.leaves(state if sabotage is None else sabotage(state))
    out: Any = suffix_forward(
        model,
        leaves,
        given.tokens,
        given.lengths,
        temperature=TEMPERATURE,
        never_sampled=kit.NEVER,
        entropy=True,
    )
    ((out.logprobs + ENTROPY * out.entropy) * given.weight).sum().backward()
    prefix_backward(state, [k.grad for k in leaves.keys], [v.grad for v in leaves.values], leaves.last_hidden.grad)
    return Result(out.logprobs.detach(), out.entropy.detach(), store.grads())


def unsplit(kit: Any, model: Any, given: Problem) -> Result:
    """From stock transformers, one sample at a time."""
    model.zero_grad()
    logprobs, entropies = torch.zeros_like(given.weight), torch.zeros_like(given.weight)
    for row, end in enumerate(given.lengths.tolist()):
        response = given.tokens[row, :end]
        logp, entropy = kit.full_logprobs(model, given.samples[row // SAMPLES], response, TEMPERATURE)
        ((logp + ENTROPY * entropy) * given.weight[row, :end]).sum().backward()
        logprobs[row, :end], entropies[row, :end] = logp.detach(), entropy.detach()
    return Result(logprobs, entropies, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def gradient_distance(kit: Any, ours: Result, full: Result) -> float:
    """Parameters that only one side has a gradient for (the unused vision tower) must have the gradient 0."""
    for name in ours.grads.keys() ^ full.grads.keys():
        assert not (ours.grads | full.grads)[name].any(), name
    both = ours.grads.keys() & full.grads.keys()
    distance: float = kit.distance({n: ours.grads[n] for n in both}, {n: full.grads[n] for n in both})
    return distance


def check(kit: Any, ours: Result, full: Result, bound: float) -> None:
    assert float((ours.logprobs - full.logprobs).exp().sub(1).abs().max()) < bound
    assert torch.allclose(ours.entropy, full.entropy, rtol=bound, atol=bound)
    assert gradient_distance(kit, ours, full) < bound


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model. tiny: 2 query heads on 1 K/V head. gpu: 4 on 2. deep: 3 on 3. qwen2: a Qwen2-VL, 2 on 1."""

    name: str
    tied: bool = False
    frozen: bool = False

    def __str__(self) -> str:
        marks = [self.name, *(["tied"] if self.tied else []), *(["frozen"] if self.frozen else [])]
        return "-".join(marks)


TINY = [Variant(name="tiny", tied=tied, frozen=frozen) for tied in (False, True) for frozen in (False, True)]
OTHERS = [Variant(name="gpu"), Variant(name="deep", tied=True, frozen=True), Variant(name="qwen2")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", [*TINY, *OTHERS], ids=str)
def test_shared_and_replicated_split_equal_the_unsplit_model_in_float64(
    kit: Any, exact: None, case: str, variant: Variant
) -> None:
    given = problem(kit, case, "float64", variant.name)
    full = unsplit(kit, kit.stock(**asdict(variant), dtype="float64"), given)
    store = kit.shared_store(**asdict(variant), dtype="float64")
    shared, replicated = split(kit, store, given), split(kit, store, given, copies=SAMPLES)
    check(kit, shared, full, 1e-12)
    check(kit, replicated, full, 1e-12)
    assert gradient_distance(kit, shared, replicated) < 1e-12
    assert any("visual" in name for name in shared.grads) is not variant.frozen


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["tiny", "gpu", "deep", "qwen2"])
def test_split_equals_the_unsplit_model_in_float32(kit: Any, name: str, case: str) -> None:
    given = problem(kit, case, "float32", name)
    full = unsplit(kit, kit.stock(name), given)
    check(kit, split(kit, kit.shared_store(name), given), full, 1e-5)


@pytest.mark.parametrize(
    ("variant", "copies"),
    [
        (Variant(name="gpu"), SAMPLES),
        (Variant(name="gpu", tied=True), 1),
        (Variant(name="gpu", frozen=True), 1),
        (Variant(name="qwen2", tied=True), SAMPLES),
        (Variant(name="qwen2", frozen=True), 1),
    ],
    ids=["replicated", "tied", "vision frozen", "Qwen2-VL replicated and tied", "Qwen2-VL, vision frozen"],
)
def test_each_variant_equals_the_unsplit_model_in_float32(kit: Any, variant: Variant, copies: int) -> None:
    given = problem(kit, "mixed", "float32", variant.name)
    full = unsplit(kit, kit.stock(**asdict(variant)), given)
    ours = split(kit, kit.shared_store(**asdict(variant)), given, copies=copies)
    check(kit, ours, full, 1e-5)
    assert any("visual" in name for name in ours.grads) is not variant.frozen


def other_prompts_positions(state: PrefixState) -> PrefixState:
    """What a stale rope_deltas does."""
    return replace(state, next_positions=state.next_positions.roll(1))


def positions_without_media(state: PrefixState) -> PrefixState:
    """What positions that count placeholders as text do."""
    return replace(state, next_positions=state.lengths.clone())


def padding_visible(state: PrefixState) -> PrefixState:
    """What a missing mask over the prefix does."""
    return replace(state, lengths=torch.full_like(state.lengths, state.keys[0].shape[2]))


@pytest.mark.parametrize("sabotage", [other_prompts_positions, positions_without_media, padding_visible])
def test_a_planted_error_in_the_state_is_caught(kit: Any, exact: None, sabotage: Sabotage) -> None:
    given = problem(kit, "mixed", "float64")
    full = unsplit(kit, kit.stock(dtype="float64"), given)
    wrong = split(kit, kit.shared_store(dtype="float64"), given, sabotage=sabotage)
    assert gradient_distance(kit, wrong, full) > 1e-3
    assert float((wrong.logprobs - full.logprobs).abs().max()) > 1e-3


def test_a_missing_causal_mask_is_caught(kit: Any, exact: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(kit, "text", "float64")
    full = unsplit(kit, kit.stock(dtype="float64"), given)
    monkeypatch.setattr(suffix, "attention_bias", lambda *_, **__: None)
    wrong = split(kit, kit.shared_store(dtype="float64"), given)
    assert gradient_distance(kit, wrong, full) > 1e-3


def test_swapped_responses_of_a_group_are_caught(kit: Any, exact: None) -> None:
    given = problem(kit, "image", "float64")
    full = unsplit(kit, kit.stock(dtype="float64"), given)
    order = torch.tensor([2, 1, 0])
    wrong = split(
        kit,
        kit.shared_store(dtype="float64"),
        replace(given, tokens=given.tokens[order], lengths=given.lengths[order]),
    )
    assert gradient_distance(kit, wrong, full) > 1e-3


def test_media_in_the_wrong_order_are_caught(kit: Any, exact: None) -> None:
    given = problem(kit, "mixed", "float64")
    full = unsplit(kit, kit.stock(dtype="float64"), given)
    other = given.samples[2]
    grids = [other.media[1], other.media[0]]
    swapped = replace(other, media=grids, pixels=other.pixels[::-1])
    wrong = split(
        kit,
        kit.shared_store(dtype="float64"),
        replace(given, samples=[*given.samples[:2], swapped, *given.samples[3:]]),
    )
    assert gradient_distance(kit, wrong, full) > 1e-3
