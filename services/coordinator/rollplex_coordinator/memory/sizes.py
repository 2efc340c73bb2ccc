"""How large each block is, from shapes: the ledger's requests, and the plan that refuses what cannot fit.

Owns the sizes of what is there from LOAD to the end. Those of units are in `unit_wants`, exact, and in `bounds`, the
largest that can come of the checked data; both ask the same `formulas`, so that a plan that fits cannot fail later.
No torch.

    block                       size                                                      alive
    --------------------------  --------------------------------------------------------  -----------------------------
    rollout K/V                 prompts once + samples' own keys and values; SGLang's     ROLLOUT, EVAL
                                pool; nothing in a replay
    reference prefix K/V        K, V, last hidden state                                   forward .. group scored
    actor prefix activations    what autograd keeps, with K and V                         forward .. prefix backward
      if layers' inputs are     those, with K and V, and one layer that runs again        forward .. prefix backward
      if nothing is             all of it, as workspace                                   prefix backward
    actor prefix K/V segment    K, V, last hidden state, and their gradients              forward .. prefix backward
    prefix, train scratch       on a GPU: of one layer, and of flash attention            ROLLOUT .. TRAIN; training
    engine scratch              SGLang: one prefill step, its pictures, logits            ROLLOUT, EVAL; its start
    score workspace             logits scratch of one chunk                               one suffix unit
    train workspace             what autograd keeps of the suffix, and logits scratch     one suffix unit
      of a verification         the same of one whole sequence, if that is more           one sequence
    inputs                      ids, positions, pixel rows of a step; two steps at once   making .. its step's end
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Self

from rollplex.config.config import Config
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table, reference_table
from rollplex.layout.shape import read_shape
from rollplex.protocol.common import Kind, Parallel
from rollplex.protocol.inputs import DataChecked
from rollplex_coordinator.memory.bounds import inputs_bound, pass_bounds, rollout_bounds
from rollplex_coordinator.memory.formulas import Formulas
from rollplex_coordinator.memory.unit_wants import UnitWants


@dataclass(frozen=True, kw_only=True)
class SegmentBytes:
    """Of a device's standing segments. Gradients: of one arena, of which there are two."""

    actor: int
    gradients: int
    reference: int
    state: int


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What a device has of model and iteration; one that is alone has all of both."""

    passes: Formulas
    """Of prefix and trainer."""
    engine: Formulas
    node: Config
    """The whole iteration: its inputs are there once a node."""


class Sizes:
    """Block sizes of one configuration and model.

    Args:
        whole: whole sequences are trained too (`rollplex verify`).
        longest_prompt: tokens, over all data; only for an engine that keeps one pool of K/V for all units.
        shares: of one device among several (`memory.device_sizes`).
        table: the parameters that such a device trains; those of the model unless given.

    Raises:
        ModelError: a model folder that cannot be used.
    """

    def __init__(
        self,
        config: Config,
        *,
        whole: bool = False,
        longest_prompt: int = 0,
        shares: Shares | None = None,
        table: ParameterTable | None = None,
    ) -> None:
        if shares is None:
            shape = read_shape(config.model.path)
            alone = Formulas(config=config, step=config, shape=shape, longest_prompt=longest_prompt)
            shares = Shares(passes=alone, engine=alone, node=config)
        self.whole = whole
        self._shares = shares
        passes = shares.passes
        self.wants = UnitWants(
            passes=passes,
            engine=shares.engine,
            copies=1 if config.run.share_prefix else config.rollout.group_size,
        )
        """What the units of a step ask for."""
        self.recompute, self.on_gpu, self.pools = passes.recomputes, passes.on_gpu, passes.pools
        """Whether a backward makes again what was not kept; on a GPU; whether the engine has one pool for all units."""
        self.vocabulary = passes.shape.vocab
        """Ids of the whole model."""
        freeze = config.model.freeze_vision
        self.table = table or parameter_table(passes.shape, dtype=config.model.dtype, freeze_vision=freeze)
        """The parameters of the storage that all map."""
        self.trained = self.table
        """Those that the trainer of a device steps."""
        self.weights_bytes = self.rollout_weights_bytes = self.table.total_bytes
        """Of the storage that all map, and of a copy that an engine holds for itself."""
        self.gradient_bytes = gradient_table(self.table).total_bytes
        self.reference_bytes = reference_table(self.table).total_bytes
        optimizer = config.optimizer
        self.state_on_host = config.state_beside_gpu
        self.optimizer_bytes = optimizer_table(self.table, name=optimizer.name, momentum=optimizer.momentum).total_bytes

    @property
    def copies(self) -> int:
        """Of each prompt."""
        return self.wants.copies

    def with_copies(self, copies: int) -> Self:
        """The same of units with so many copies of each prompt."""
        other = copy.copy(self)
        other.wants = replace(self.wants, copies=copies)
        return other

    def segments_of(self, parallel: Parallel) -> SegmentBytes:
        """Of the segments that are there from LOAD to the end, on the device of a process.

        Args:
            parallel: where it stands; of one device there is one answer.
        """
        assert parallel.alone, f"sizes of one device were asked for those of {parallel}"
        return SegmentBytes(
            actor=self.weights_bytes,
            gradients=self.gradient_bytes,
            reference=self.reference_bytes,
            state=self.optimizer_bytes,
        )

    def bounds(self, data: DataChecked) -> dict[str, int]:
        """The largest that each kind of unit block can become, by name; of several devices with the inputs of the whole
        node."""
        shares = self._shares
        return {
            **rollout_bounds(shares.engine, data),
            **pass_bounds(shares.passes, data, copies=self.copies, whole=self.whole),
            Kind.INPUTS: inputs_bound(shares.node, data),
        }
