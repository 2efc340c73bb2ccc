"""What a rollout engine is: the contract between the rollout service and whatever samples tokens.

Owns the values that cross that border and the rules below. Knows no engine, no tensor library, no message socket and no
weights header: the service reads the header before it calls `generate` and whenever a group is announced.

Rules of the contract:

* A unit is one batch. What is computed together is a pure function of the unit (and of the tokens that came out of it),
  never of time, free memory or other units. Engines that schedule by themselves (SGLang) break this rule and say so.
* A group is announced through the callback, from the thread that called `generate`, at once when its last sample
  stops, and exactly once: before the next decode step starts, if the engine computes in that thread. Groups whose ends
  are seen together are announced in the order of the unit's prompts.
* Rows of samples that have stopped go on in the batch, or leave it at points that only the tokens decide.
* A response ends with its stop id if it met one; the stop id is its last token and has a log-probability.
* Ids of `never_sampled` are never drawn.
* A log-probability is log-softmax(logits / temperature) over all ids but `never_sampled`, before top-k and top-p; at
  temperature 0 (greedy) that of temperature 1.
* An exception of the callback ends the unit and comes out of `generate` unchanged.
* After `generate` returns or raises, the unit's K/V is given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollplex.errors import DivergedError, EngineError
from rollplex.layout.parallel.plan import DevicePlan
from rollplex.layout.parameters import ParameterTable
from rollplex.layout.shape import ModelShape
from rollplex.memory.digest import digest
from rollplex.memory.segment import Mapping
from rollplex.protocol.common import ModelSpec, Parallel, PromptSlot, SegmentRef
from rollplex.protocol.rollout import EngineSpec, Sampling


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Prompts that are sampled together."""

    step: int
    prompts: tuple[PromptSlot, ...]
    sampling: Sampling
    inputs: Mapping
    """The segment that the slots point into."""
    inputs_fd: int | None = None
    """Its descriptor, for an engine with processes of its own that map it; not the engine's to close."""

    @property
    def rows(self) -> int:
        """Rows of the decode batch, prompt by prompt: row = prompt index × group size + sample."""
        return len(self.prompts) * self.sampling.group_size

    @property
    def longest(self) -> int:
        """Tokens that the longest response of such a unit can have."""
        return self.sampling.longest_response

    def limits(self) -> NDArray[np.int64]:
        """Greatest length of each row's response, int64 [rows]; with forced lengths the exact one.

        Raises:
            EngineError: a forced length is 0 or exceeds `max_new_tokens`.
        """
        sampling = self.sampling
        forced = np.asarray(sampling.forced_lengths, dtype=np.int64)
        if not forced.size:
            return np.full(self.rows, sampling.max_new_tokens, dtype=np.int64)
        if forced.min() < 1 or forced.max() > sampling.max_new_tokens:
            raise EngineError(
                "A forced response length cannot be reached",
                got=f"{forced.min()} .. {forced.max()}",
                needed=f"1 .. max_new_tokens = {sampling.max_new_tokens}",
            )
        groups = np.asarray([slot.group for slot in self.prompts], dtype=np.int64)
        index = groups[:, None] * sampling.group_size + np.arange(sampling.group_size)
        limits: NDArray[np.int64] = forced[index.reshape(-1) % forced.size]
        return limits

    def check(self) -> None:
        """Refuse a unit that no engine can sample.

        Raises:
            EngineError: no prompts, a repeated group, a group size or token limit of 0, an impossible forced length.
        """
        groups = [slot.group for slot in self.prompts]
        for wrong, what in (
            (not groups, "A unit has no prompts"),
            (len(set(groups)) != len(groups), "A unit names a group twice"),
            (self.sampling.group_size < 1, "A unit asks for groups without samples"),
            (self.sampling.max_new_tokens < 1, "A unit asks for responses without tokens"),
        ):
            if wrong:
                raise EngineError(what, got=f"groups {groups}", where=f"step {self.step}")
        self.limits()


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """The responses of one prompt."""

    group: int
    lengths: tuple[int, ...]
    tokens: NDArray[np.int32]
    """[sum of lengths], one sample after the other."""
    logprobs: NDArray[np.float64]
    """[sum of lengths], as `tokens`."""
    stopped: tuple[bool, ...]
    """Per sample: its last token is a stop id."""


@dataclass(frozen=True, kw_only=True)
class UnitReport:
    """What a finished unit cost. Times are CLOCK_MONOTONIC seconds."""

    start_s: float
    prefill_end_s: float
    end_s: float
    decode_steps: int
    """Forward passes of the decode batch; the first token of a response comes from the prefill. Of an engine that does
    not tell: those that the longest response needs."""
    vision_prompts: int
    """Prompts that went through the vision tower, counted at the tower or, where that is out of sight, as they were
    sent to it."""
    kv_bytes: int
    """K/V really held at the unit's peak."""


class Weights(Protocol):
    """The segment of the actor weights, as an engine may have it: mapped here, or as a descriptor for a process of the
    engine's own. Whichever it takes stays until the process ends."""

    @property
    def ref(self) -> SegmentRef: ...

    def mapping(self) -> Mapping:
        """Mapped into this process; for memory of a GPU that makes a context. The same mapping each time."""
        ...

    def descriptor(self) -> int:
        """Open as long as this process lives; whoever sends it on keeps it open here."""
        ...


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an engine is made over."""

    spec: ModelSpec
    shape: ModelShape
    table: ParameterTable
    weights: Weights
    """The actor weights; the engine samples from these bytes and copies none of them."""
    engine: EngineSpec
    run_dir: Path | None
    """Where an engine may make a folder for sockets of its own; None where there is no run."""
    parallel: Parallel = field(default_factory=Parallel)
    """With whom this process samples."""
    device: DevicePlan | None = None
    """What the segment holds, where it is planned for several degrees. None: the parameter table."""

    @property
    def actor(self) -> Mapping:
        """The weights, mapped into this process."""
        return self.weights.mapping()

    @property
    def weight_bytes(self) -> int:
        """Of the segment, header included."""
        return self.table.total_bytes if self.device is None else self.device.storage.total_bytes

    def digest(self) -> str:
        """`rollplex.memory.digest.digest` of the weights, as this process has them mapped."""
        return digest(self.actor, self.table, self.weight_bytes)


Announce: TypeAlias = Callable[[FinishedGroup], None]


def nobody() -> None:
    """Nobody wants to know that a unit is prefilled."""


class Engine(Protocol):
    """Samples responses from the weights that it was made over."""

    @property
    def on_policy(self) -> bool:
        """Whether tokens are sampled from the mapped weights themselves, whose version the header shows."""
        ...

    @property
    def actor(self) -> Mapping:
        """The weights segment as this process can read it; at least its header page. Not for tensors."""
        ...

    def digest(self) -> str:
        """`rollplex.memory.digest.digest` of the weights that it reads."""
        ...

    def check_mapped(self) -> None:
        """Look whether the weights that it reads are the mapped ones.

        Raises:
            SegmentError: a weight lies elsewhere.
        """
        ...

    def kv_bytes(self, unit: Unit) -> int:
        """K/V that `generate` will hold for this unit, predicted from shapes.

        Raises:
            EngineError: the engine has no room for such a unit.
        """
        ...

    def generate(self, unit: Unit, announce: Announce, prefilled: Callable[[], None] = nobody) -> UnitReport:
        """Sample the unit by the rules of this module.

        Args:
            unit: the prompts and how they are sampled.
            announce: is told of each group that is finished.
            prefilled: called at most once, in the same thread, when every prompt has its first token; an engine that
                cannot tell does not call it.

        Raises:
            EngineError: the unit cannot be sampled.
            DivergedError: the model's logits are not finite.
        """
        ...

    def drop_caches(self) -> None:
        """Forget whatever depends on the weights: they have changed. Called after each commit, and before the first
        unit, since they may not have been filled while the engine was made."""
        ...

    def close(self) -> None:
        """Give back the model and every view of the weights; the engine is not used afterwards."""
        ...


def diverged(got: str, where: str = "") -> DivergedError:
    """What an engine raises that cannot sample because logits are not finite."""
    return DivergedError(
        "The model's logits are not finite",
        got=got,
        needed="numbers",
        do="Look at gradient norm and loss of the last iterations, and go on from a checkpoint before them with a "
        "lower optimizer.lr.",
        where=where,
    )


EngineFactory: TypeAlias = Callable[[Setup], Engine]
"""Raises ModelError if the model cannot be built."""
