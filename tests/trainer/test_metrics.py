"""Metrics of a step against their definitions, written out over all samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch

from rollplex.errors import ProtocolError
from rollplex.protocol.common import Kind, SegmentRef
from rollplex.protocol.trainer import Loss
from rollplex_trainer.losses import unit_loss
from rollplex_trainer.metrics import StepMetrics
from rollplex_trainer.unit import SuffixUnit, read_unit
from support.trainer import Sampled, World

KV = SegmentRef(segment=99, kind=Kind.ACTOR_PREFIX_KV, size_bytes=1)
RATIO = 0.3
"""Half-width of the log-ratios between the policy and the policy that sampled."""


class Fed:
    """Metrics of some units, fed with made-up log-probabilities, and all numbers as plain lists."""

    def __init__(self, world: World, groups: list[Sampled], split: tuple[int, ...], loss: Loss = Loss.GRPO) -> None:
        self.algorithm = algorithm = msgspec.structs.replace(world.algorithm, loss=loss)
        self.metrics = StepMetrics(algorithm)
        self.units: list[SuffixUnit] = []
        self.logprobs: list[list[float]] = []
        self.old: list[list[float]] = []
        self.entropy: list[list[float]] = []
        self.loss = self.policy = 0.0
        start = 0
        for number, size in enumerate(split):
            part = groups[start : start + size]
            unit = read_unit(world.train_message(KV, part, start=start, unit=number), algorithm, 70)
            start += size
            self._feed(unit, number)

    def _feed(self, unit: SuffixUnit, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        shape = unit.tokens.shape
        logprobs = unit.rollout + 0.2 * torch.randn(shape, generator=draw, dtype=torch.float64)
        old = logprobs - RATIO * (2 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1) * 2
        entropy = 4 * torch.rand(shape, generator=draw, dtype=torch.float64)
        mask = torch.arange(shape[1]) < unit.lengths[:, None]
        parts = unit_loss(
            self.algorithm,
            logprobs=logprobs,
            old=old,
            reference=unit.reference,
            entropy=entropy,
            mask=mask,
            advantages=unit.advantages,
            weights=unit.weights,
        )
        self.metrics.add(unit, parts, logprobs, entropy, mask)
        self.units.append(unit)
        self.loss += parts.total.item()
        self.policy += parts.policy.item()
        for row, length in enumerate(unit.lengths.tolist()):
            self.logprobs.append(logprobs[row, :length].tolist())
            self.old.append(old[row, :length].tolist())
            self.entropy.append(entropy[row, :length].tolist())

    @property
    def result(self) -> dict[str, float]:
        return self.metrics.result(grad_norm=2.5, learning_rate=0.125)


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_every_metric_is_what_its_name_says(world: World, groups: list[Sampled]) -> None:
    fed = Fed(world, groups, (1, 2))
    rewards = [r for g in groups for r in g.rewards]
    rollout = flat([row for g in groups for row in g.rollout])
    reference = flat([row for g in groups for row in g.reference])
    own = flat(fed.logprobs)
    lengths = [len(row) for row in fed.logprobs]
    kl = [math.exp(r - x) - (r - x) - 1 for r, x in zip(reference, own, strict=True)]
    difference = [x - r for x, r in zip(own, rollout, strict=True)]
    advantages = [a for unit in fed.units for a in unit.advantages.tolist()]
    ratios = [[math.exp(x - o) for x, o in zip(*rows, strict=True)] for rows in zip(fed.logprobs, fed.old, strict=True)]
    low = [[r < 0.8 and a < 0 for r in row] for row, a in zip(ratios, advantages, strict=True)]
    high = [[r > 1.2 and a > 0 for r in row] for row, a in zip(ratios, advantages, strict=True)]
    shares = {"low": [sum(row) / len(row) for row in low], "high": [sum(row) / len(row) for row in high]}
    assert 0 < sum(map(sum, low)) < sum(lengths)
    assert 0 < sum(map(sum, high)) < sum(lengths)
    assert fed.result == pytest.approx(
        {
            "loss": fed.loss / 9,
            "policy_loss": fed.policy / 9,
            "loss_normaliser": 9.0,
            "grad_norm": 2.5,
            "learning_rate": 0.125,
            "groups": 3.0,
            "groups_skipped": 0.0,
            "reward": statistics.fmean(rewards),
            "reward_std": statistics.stdev(rewards),
            "frac_reward_zero_std": 1 / 3,
            "kl": statistics.fmean(kl),
            "entropy": statistics.fmean(flat(fed.entropy)),
            "logprob_mean": statistics.fmean(own),
            "clip_ratio/low_mean": sum(map(sum, low)) / sum(lengths),
            "clip_ratio/low_min": min(shares["low"]),
            "clip_ratio/high_mean": sum(map(sum, high)) / sum(lengths),
            "clip_ratio/high_max": max(shares["high"]),
            "clip_ratio/region_mean": sum(map(sum, low + high)) / sum(lengths),
            "completions/mean_length": statistics.fmean(lengths),
            "completions/min_length": 1.0,
            "completions/max_length": 6.0,
            "sampling/sampling_logp_difference/mean": statistics.fmean(map(abs, difference)),
            "sampling/sampling_logp_difference/max": max(map(abs, difference)),
            "sampling/importance_sampling_ratio/min": math.exp(min(difference)),
            "sampling/importance_sampling_ratio/mean": statistics.fmean(map(math.exp, difference)),
            "sampling/importance_sampling_ratio/max": math.exp(max(difference)),
        },
        rel=1e-12,
    )


@pytest.mark.parametrize("loss", [Loss.RLOO, Loss.GSPO])
def test_clip_ratios_count_sequences_where_the_ratio_is_one_per_sequence(
    world: World, groups: list[Sampled], loss: Loss
) -> None:
    fed = Fed(world, groups, (3,), loss)
    advantages = [a for unit in fed.units for a in unit.advantages.tolist()]
    clipped = []
    for own, old, a in zip(fed.logprobs, fed.old, advantages, strict=True):
        total = sum(own) - sum(old)
        ratio = math.exp(total if loss is Loss.RLOO else total / len(own))
        clipped.append((a < 0 and ratio < 0.8) or (a > 0 and ratio > 1.2))
    assert fed.result["clip_ratio/region_mean"] == pytest.approx(sum(clipped) / 9, rel=1e-12)


def test_what_has_no_reward_counts_in_lengths_but_not_in_kl_and_rewards(world: World, groups: list[Sampled]) -> None:
    skipped = [groups[0], replace(groups[1], rewards=[math.nan] * 3), groups[2]]
    fed = Fed(world, skipped, (1, 1, 1))
    known = [r for g in (groups[0], groups[2]) for r in g.rewards]
    result = fed.result
    assert result["groups_skipped"] == 1.0
    assert result["frac_reward_zero_std"] == 0.0
    assert result["reward"] == pytest.approx(statistics.fmean(known), rel=1e-12)
    assert result["reward_std"] == pytest.approx(statistics.stdev(known), rel=1e-12)
    counted = flat(fed.logprobs[:3] + fed.logprobs[6:])
    assert result["logprob_mean"] == pytest.approx(statistics.fmean(counted), rel=1e-12)
    assert result["completions/mean_length"] == pytest.approx(statistics.fmean(map(len, fed.logprobs)), rel=1e-12)


def test_a_step_with_nothing_has_no_loss_and_no_rewards(world: World) -> None:
    metrics = StepMetrics(world.algorithm)
    assert metrics.result(grad_norm=0.0, learning_rate=0.1) == {
        "grad_norm": 0.0,
        "learning_rate": 0.1,
        "loss_normaliser": 0.0,
        "groups": 0.0,
        "groups_skipped": 0.0,
    }


def test_numbers_that_are_not_finite_are_left_out(world: World, groups: list[Sampled]) -> None:
    fed = Fed(world, groups, (3,))
    assert "grad_norm" not in fed.metrics.result(grad_norm=math.nan, learning_rate=0.1)


def test_sums_taken_in_from_others_are_those_of_one_that_has_all_units(world: World, groups: list[Sampled]) -> None:
    whole, first = Fed(world, groups, (1, 2)), Fed(world, groups, (1,))
    other = Fed(world, [], ())
    other._feed(read_unit(world.train_message(KV, groups[1:], start=1, unit=1), whole.algorithm, 70), 1)
    joint = StepMetrics(world.algorithm)
    for part in (first, other, Fed(world, [], ())):
        joint.take_in(part.metrics.encoded())
    found = joint.result(grad_norm=2.5, learning_rate=0.125)
    assert found.keys() == whole.result.keys()
    assert found == pytest.approx(whole.result, rel=1e-12)
    alone = StepMetrics(world.algorithm)
    alone.take_in(first.metrics.encoded())
    assert alone.result(grad_norm=2.5, learning_rate=0.125) == first.result, "bit for bit"


def test_sums_that_are_none_are_refused(world: World) -> None:
    with pytest.raises(ProtocolError, match="Sums of another process"):
        StepMetrics(world.algorithm).take_in(b"\x80")
