"""From logits and a uniform number to a token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rollplex.errors import DivergedError, EngineError
from rollplex_rollout.philox import Draws
from rollplex_rollout.sampling import Rule, draw, exclusion, inverse_cdf, keep_top

JUST_BELOW_ONE = 1.0 - 2.0**-53


def rule(
    *, vocab: int = 8, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, never: tuple[int, ...] = ()
) -> Rule:
    return Rule(temperature=temperature, top_p=top_p, top_k=top_k, excluded=exclusion(never, vocab))


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def fair(rows: int, *, seed: int = 0) -> Tensor:
    draws = Draws(seed=seed, purpose="train", step=0, prompts=list(range(rows)), samples=[0] * rows)
    return torch.from_numpy(draws.at(0).copy())


def logits_of(*weights: float) -> Tensor:
    return torch.tensor([weights], dtype=torch.float64).log()


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities * len(tokens)
    inside = expected > 0
    assert float(counts[~inside].sum()) == 0.0
    return float(((counts - expected)[inside] ** 2 / expected[inside]).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(5))
    tokens = draw(logits.expand(40_000, -1), fair(40_000), rule(vocab=16, temperature=temperature))
    expected = torch.softmax(logits.double() / temperature, dim=-1)
    assert 3.0 < chi_square(tokens, expected) < 45.0  # 15 degrees of freedom: 99.9 % of fair draws


def test_frequencies_follow_the_rule_under_top_k_top_p_and_excluded_ids() -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(6))
    picked = rule(vocab=16, temperature=0.8, top_p=0.9, top_k=8, never=(int(logits.argmax()), 3))
    tokens = draw(logits.expand(40_000, -1), fair(40_000, seed=2), picked)
    weights = torch.softmax(logits.double() / 0.8, dim=-1).masked_fill(picked.excluded, 0.0)
    order = sorted(range(16), key=lambda token: (-float(weights[token]), token))[:8]
    total, running, kept = float(weights[order].sum()), 0.0, []
    for token in order:
        kept.append(token)
        running += float(weights[token])
        if running >= 0.9 * total:
            break
    expected = torch.zeros(16, dtype=torch.float64)
    expected[kept] = weights[kept] / weights[kept].sum()
    assert 1 < len(kept) < 8
    assert 0.1 < chi_square(tokens, expected) < 30.0


def test_the_token_is_the_first_whose_running_sum_exceeds_the_number() -> None:
    weights = numbers(0.25, 0.0, 0.25, 0.5).expand(6, -1)
    uniforms = numbers(0.0, 0.2499, 0.25, 0.4999, 0.5, JUST_BELOW_ONE)
    assert inverse_cdf(weights, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


def test_a_number_next_to_one_gives_the_last_id_that_has_weight() -> None:
    weights = numbers(0.0, 0.1, 0.7, 0.3, 0.0, 0.0)
    for scale in (1.0, 3.0, 1e-300, 1e300, 0.1, 7.0 / 3.0):
        assert inverse_cdf(weights[None] * scale, numbers(JUST_BELOW_ONE)).tolist() == [3]
        assert inverse_cdf(weights[None] * scale, numbers(0.0)).tolist() == [1]


def test_random_weights_at_both_ends_never_give_an_id_without_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(2_000, 40, generator=generator, dtype=torch.float64)
    weights[torch.rand(2_000, 40, generator=generator) < 0.5] = 0.0
    weights[:, 7] += 1e-9
    for uniform in (0.0, JUST_BELOW_ONE):
        tokens = inverse_cdf(weights, torch.full((2_000,), uniform, dtype=torch.float64))
        assert float(weights.gather(1, tokens[:, None]).min()) > 0.0


def test_excluded_ids_never_appear_even_at_top_p_one_and_temperature_100() -> None:
    logits = torch.zeros(50_000, 8)
    logits[:, [0, 5, 7]] = 1e4  # by far the likeliest
    tokens = draw(logits, fair(50_000), rule(temperature=100.0, never=(0, 5, 7)))
    assert sorted(set(tokens.tolist())) == [1, 2, 3, 4, 6]
    ends = draw(logits[:2], numbers(0.0, JUST_BELOW_ONE), rule(temperature=100.0, never=(0, 5, 7)))
    assert ends.tolist() == [1, 6]


def test_top_k_one_is_the_greatest_logit_and_of_equal_ones_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 5.0]])
    for uniform in (0.0, 0.5, JUST_BELOW_ONE):
        tokens = draw(logits, torch.full((3,), uniform, dtype=torch.float64), rule(vocab=4, top_k=1))
        assert tokens.tolist() == [1, 0, 3]


@pytest.mark.parametrize(
    ("weights", "top_k", "top_p", "kept"),
    [
        ((1.0, 1.0, 1.0, 1.0), 2, 1.0, [0, 1]),  # ties: rising id
        ((1.0, 2.0, 1.0, 2.0), 3, 1.0, [0, 1, 3]),
        ((1.0, 2.0, 3.0, 4.0), 9, 1.0, [0, 1, 2, 3]),  # more than there are
        ((1.0, 1.0, 1.0, 1.0), 0, 0.5, [0, 1]),  # reached exactly: no further id
        ((1.0, 1.0, 1.0, 1.0), 0, 0.51, [0, 1, 2]),
        ((8.0, 1.0, 1.0, 0.0), 0, 1e-12, [0]),  # at least one stays
        ((1.0, 8.0, 1.0, 0.0), 0, 0.8, [1]),
        ((1.0, 8.0, 1.0, 0.0), 0, 0.85, [0, 1]),
        ((4.0, 3.0, 2.0, 1.0), 2, 0.57, [0]),  # top-p counts within what top-k left: 4 / 7 reaches 0.57
        ((4.0, 3.0, 2.0, 1.0), 2, 0.58, [0, 1]),
        ((4.0, 3.0, 2.0, 1.0), 0, 0.58, [0, 1]),
        ((0.0, 0.0, 1.0, 0.0), 3, 0.99, [2]),
    ],
)
def test_top_k_and_top_p_keep_what_the_rule_says(
    weights: tuple[float, ...], top_k: int, top_p: float, kept: list[int]
) -> None:
    result = keep_top(numbers(*weights)[None], top_k=top_k, top_p=top_p)[0]
    assert result.nonzero().squeeze(-1).tolist() == kept
    assert torch.equal(result[kept], numbers(*weights)[kept])


def test_filters_that_are_off_change_nothing() -> None:
    weights = torch.rand(5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert keep_top(weights, top_k=0, top_p=1.0) is weights
    assert torch.equal(keep_top(weights, top_k=30, top_p=1.0), weights)


def test_greedy_takes_the_greatest_allowed_logit_whatever_the_number_and_the_filters() -> None:
    logits = torch.tensor([[0.0, 9.0, 4.0, 4.0, -1.0, 0.0, 0.0, 8.0]]).expand(3, -1)
    greedy = rule(temperature=0.0, top_p=0.1, top_k=3, never=(1, 7))
    assert draw(logits, numbers(0.0, 0.5, JUST_BELOW_ONE), greedy).tolist() == [2, 2, 2]


def test_a_tiny_temperature_is_greedy_in_the_limit_and_makes_no_nan() -> None:
    logits = torch.tensor([[-3.0, 1.0, 0.5, 1.0 - 1e-6]])
    assert draw(logits, numbers(JUST_BELOW_ONE), rule(vocab=4, temperature=1e-12)).tolist() == [1]


def test_a_row_draws_the_same_token_whatever_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(9)
    logits, uniforms = torch.randn(131, 97, generator=generator) * 3, fair(131)
    for picked in (rule(vocab=97, temperature=0.7), rule(vocab=97, temperature=1.3, top_p=0.8, top_k=20, never=(3,))):
        whole = draw(logits, uniforms, picked)
        for rows in ([0], [130], [5, 6, 7], list(range(1, 131)), list(reversed(range(131)))):
            assert torch.equal(draw(logits[rows], uniforms[rows], picked), whole[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logits_of_any_floating_dtype_are_drawn_from_in_fp64(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 33, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert torch.equal(draw(logits, fair(64), rule(vocab=33)), draw(logits.double(), fair(64), rule(vocab=33)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused_with_the_row(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = bad
    with pytest.raises(DivergedError, match=r"not finite; got samples \[1\]"):
        draw(logits, fair(3), rule(temperature=temperature))


def test_a_row_of_minus_infinity_is_refused_and_a_single_one_is_not() -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = -torch.inf
    assert int(draw(logits, numbers(0.4, 0.4), rule())[0]) != 3
    logits[1] = -torch.inf
    with pytest.raises(DivergedError, match="samples \\[1\\]"):
        draw(logits, fair(2), rule())


def test_excluded_ids_outside_the_vocabulary_play_no_part_and_all_of_it_is_refused() -> None:
    assert exclusion((2, 2, 0, 4, 99), 4).tolist() == [True, False, True, False]
    with pytest.raises(EngineError, match="No id is left"):
        exclusion((0, 1), 2)
