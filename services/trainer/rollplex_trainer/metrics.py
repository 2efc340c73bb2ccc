"""What one step reports, under TRL's names where TRL has the quantity.

Owns: the sums over a step and the names. Every number is a function of the data alone, summed in float64 in the order
of the units. Does not know: time, memory, the journal.

TRL's                                       over
  loss, policy_loss, grad_norm, learning_rate
  reward, reward_std                        all samples with a reward
  frac_reward_zero_std                      groups with a reward: those whose rewards are all equal
  kl, entropy                               tokens of samples that count (kl: the estimator of the loss)
  clip_ratio/low_mean, high_mean,           tokens of samples that count, or those samples where the ratio is one per
    region_mean, low_min, high_max          sequence; min and max over sequences
  completions/mean_length, min_, max_       all samples
  sampling/sampling_logp_difference/mean,   all tokens: |rollout's log-probability - trainer's|
    max; importance_sampling_ratio/...      exp(trainer's - rollout's), per token
ours
  groups, groups_skipped                    groups of the step, and those without any reward
  loss_normaliser                           what the summed loss was divided by
  logprob_mean                              tokens of samples that count
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from rollplex.advantages import Float64s, standard_deviation
from rollplex.errors import ProtocolError
from rollplex.protocol.trainer import Algorithm
from rollplex_trainer.losses import LossParts
from rollplex_trainer.unit import SuffixUnit

Bools: TypeAlias = npt.NDArray[np.bool_]

_LENGTH = "completions/length"
_DIFFERENCE = "sampling/sampling_logp_difference"
_RATIO = "sampling/importance_sampling_ratio"
_LOW, _HIGH, _REGION = "clip_ratio/low", "clip_ratio/high", "clip_ratio/region"
_LOW_SEQUENCES, _HIGH_SEQUENCES = f"{_LOW}_by_sequence", f"{_HIGH}_by_sequence"

_NAMES = {
    _LENGTH: (
        ("completions/mean_length", "mean"),
        ("completions/min_length", "least"),
        ("completions/max_length", "greatest"),
    ),
    _DIFFERENCE: ((f"{_DIFFERENCE}/mean", "mean"), (f"{_DIFFERENCE}/max", "greatest")),
    _RATIO: ((f"{_RATIO}/min", "least"), (f"{_RATIO}/mean", "mean"), (f"{_RATIO}/max", "greatest")),
    _LOW: (("clip_ratio/low_mean", "mean"),),
    _HIGH: (("clip_ratio/high_mean", "mean"),),
    _REGION: (("clip_ratio/region_mean", "mean"),),
    _LOW_SEQUENCES: (("clip_ratio/low_min", "least"),),
    _HIGH_SEQUENCES: (("clip_ratio/high_max", "greatest"),),
}
"""Which parts of a tally are published under which names; all others as their mean, under their own."""


class Tally:
    """Sum, count and extremes of a quantity over units."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.least = math.inf
        self.greatest = -math.inf

    def add(self, values: Float64s | Bools) -> None:
        if values.size:
            self.total += float(values.sum(dtype=np.float64))
            self.count += values.size
            self.least = min(self.least, float(values.min()))
            self.greatest = max(self.greatest, float(values.max()))

    def take_in(self, total: float, count: int, least: float, greatest: float) -> None:
        """Of other units."""
        self.total += total
        self.count += count
        self.least = min(self.least, least)
        self.greatest = max(self.greatest, greatest)

    @property
    def mean(self) -> float:
        return self.total / self.count


class _Sums(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`StepMetrics` on its way to another process."""

    loss: float
    policy_loss: float
    normaliser: float
    rewards: list[bytes]
    """Of each group, float64."""
    spread: list[bool]
    tallies: dict[str, tuple[float, int, float, float]]


class StepMetrics:
    """Sums over the units of one step."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self._loss = 0.0
        self._policy_loss = 0.0
        self.normaliser = 0.0
        self._rewards: list[Float64s] = []
        self._spread: list[bool] = []
        self._tallies: dict[str, Tally] = {}

    def add(self, unit: SuffixUnit, parts: LossParts, logprobs: Tensor, entropy: Tensor, mask: Tensor) -> None:
        """Take one unit in. logprobs, entropy, mask: [rows, R] as the suffix forward gave them."""
        self._loss += float(parts.total.detach())
        self._policy_loss += float(parts.policy)
        self.normaliser += float(parts.normaliser)
        self._rewards += unit.rewards
        self._spread += [group.spread for group in unit.groups]

        real = _array(mask).astype(np.bool_)
        counted = _array(unit.weights) > 0
        seen = real & counted[:, None]
        own = _array(logprobs)
        difference = own[real] - _array(unit.rollout)[real]
        self._tally(_LENGTH, _array(unit.lengths))
        self._tally(_DIFFERENCE, np.abs(difference))
        self._tally(_RATIO, np.exp(difference))
        self._tally("logprob_mean", own[seen])
        self._tally("entropy", _array(entropy)[seen])
        if parts.kl is not None:
            self._tally("kl", _array(parts.kl)[seen])
        self._add_clipping(_array(parts.ratio), _array(unit.advantages), seen, counted)

    def encoded(self) -> bytes:
        """The sums, for another process (`take_in`)."""
        sums = _Sums(
            loss=self._loss,
            policy_loss=self._policy_loss,
            normaliser=self.normaliser,
            rewards=[rewards.astype("<f8").tobytes() for rewards in self._rewards],
            spread=self._spread,
            tallies={name: (t.total, t.count, t.least, t.greatest) for name, t in self._tallies.items()},
        )
        return msgspec.msgpack.encode(sums)

    def take_in(self, encoded: bytes) -> None:
        """Add what another process summed over other units of the step, behind what is here. Raises ProtocolError."""
        try:
            sums = msgspec.msgpack.decode(encoded, type=_Sums)
        except msgspec.DecodeError as error:
            raise ProtocolError("Sums of another process cannot be read", got=str(error)) from error
        self._loss += sums.loss
        self._policy_loss += sums.policy_loss
        self.normaliser += sums.normaliser
        self._rewards += [np.frombuffer(rewards, dtype="<f8").astype(np.float64) for rewards in sums.rewards]
        self._spread += sums.spread
        for name, tally in sums.tallies.items():
            self._tallies.setdefault(name, Tally()).take_in(*tally)

    def result(self, *, grad_norm: float, learning_rate: float) -> dict[str, float]:
        """The step's metrics. A quantity that the step does not have (no sample with a reward) is left out, and so is
        a number that is not finite: the vote already says so, and few readers of metrics take it."""
        out = {
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "loss_normaliser": self.normaliser,
            "groups": float(len(self._rewards)),
            "groups_skipped": float(sum(bool(np.isnan(rewards).all()) for rewards in self._rewards)),
        }
        if self.normaliser > 0:
            out["loss"] = self._loss / self.normaliser
            if self.algorithm.entropy_bonus != 0.0:
                out["policy_loss"] = self._policy_loss / self.normaliser
        out |= self._reward_metrics()
        for name, tally in self._tallies.items():
            if tally.count:
                out |= {public: getattr(tally, part) for public, part in _NAMES.get(name, ((name, "mean"),))}
        return {name: value for name, value in out.items() if math.isfinite(value)}

    def _add_clipping(self, ratio: Float64s, advantages: Float64s, seen: Bools, counted: Bools) -> None:
        low = (ratio < 1 - self.algorithm.clip_low) & (advantages < 0)[:, None]
        high = (ratio > 1 + self.algorithm.clip_high) & (advantages > 0)[:, None]
        where = seen if ratio.shape == seen.shape else counted[:, None]
        self._tally(_REGION, (low | high)[where])
        tokens = np.maximum(where[counted].sum(1), 1)
        for clipped, name, by_sequence in ((low, _LOW, _LOW_SEQUENCES), (high, _HIGH, _HIGH_SEQUENCES)):
            self._tally(name, clipped[where])
            self._tally(by_sequence, (clipped & where)[counted].sum(1) / tokens)

    def _reward_metrics(self) -> dict[str, float]:
        if not self._rewards:
            return {}
        every = np.concatenate(self._rewards)
        known = every[~np.isnan(every)]
        if not known.size:
            return {}
        scored = [spread for spread, r in zip(self._spread, self._rewards, strict=True) if not np.isnan(r).all()]
        return {
            "reward": float(known.mean()),
            "reward_std": standard_deviation(known),
            "frac_reward_zero_std": 1 - sum(scored) / len(scored),
        }

    def _tally(self, name: str, values: Float64s | Bools) -> None:
        self._tallies.setdefault(name, Tally()).add(values)


def _array(values: Tensor) -> Float64s:
    out: Float64s = values.detach().to("cpu").double().numpy()
    return out
