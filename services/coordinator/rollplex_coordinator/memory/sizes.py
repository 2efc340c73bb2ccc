"""How large each block is, from shapes: the ledger's requests, and the plan that refuses what cannot fit.

Owns the mapping from units to `rollplex.memory.predict`. The same functions give the exact size of a unit in a step and
the upper bound over the checked data, so that a plan that fits cannot fail later. No torch.

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

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.config import wire
from rollplex.config.config import Config
from rollplex.journal.phases import Phase
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import ITEM_BYTES, ParameterTable, gradient_table, parameter_table, reference_table
from rollplex.layout.shape import ModelShape, read_shape
from rollplex.memory.predict import (
    Grid,
    engine_scratch_bytes,
    kv_bytes,
    kv_segment_bytes,
    logits_bytes,
    packed_suffix_saved_bytes,
    packs_suffix,
    pool_kv_bytes,
    prefix_activation_bytes,
    prefix_layers_bytes,
    rollout_kv_bytes,
    scored_rows,
    scratch_bytes,
    suffix_saved_bytes,
    whole_logits_bytes,
    whole_saved_bytes,
)
from rollplex.protocol.common import Kind, Parallel, PromptSlot, Responses, Role
from rollplex.protocol.inputs import DataChecked, SourceChecked
from rollplex.protocol.prefix import Activations, Which
from rollplex.protocol.rollout import Sampling
from rollplex_coordinator.decisions.plan import plan_step
from rollplex_coordinator.memory.leasing import Want

ROLLOUT_KV = "rollout K/V"
OWN_WEIGHTS = "SGLang's own copy"
SCORE_WORKSPACE = "score workspace"
TRAIN_WORKSPACE = "train workspace"
PREFIX_BACKWARD = "prefix backward"
ENGINE_SCRATCH = "engine scratch"
PREFIX_SCRATCH = "prefix scratch"
TRAIN_SCRATCH = "train scratch"
"""Reservations that nothing is leased from: what passes hold for a moment."""


@dataclass(frozen=True, kw_only=True)
class SegmentBytes:
    """Of a device's standing segments. Gradients: of one arena, of which there are two."""

    actor: int
    gradients: int
    reference: int
    state: int


class Sizes:
    """Block sizes of one configuration and model.

    Args:
        whole: whole sequences are trained too (`rollplex verify`).
        longest_prompt: tokens, over all data; only for an engine that keeps one pool of K/V for all units.
        shape: of the model, or of a tensor-parallel rank's share of it; that of the model folder unless given.
        table: the parameters of that share; those of `shape` unless given.
        step: the configuration of the whole iteration, where `config` has a share of its prompts.

    `memory.device_sizes` has the same of one device among several.

    Raises:
        ModelError: a model folder that cannot be used.
    """

    def __init__(
        self,
        config: Config,
        *,
        whole: bool = False,
        longest_prompt: int = 0,
        shape: ModelShape | None = None,
        table: ParameterTable | None = None,
        step: Config | None = None,
    ) -> None:
        self._config, self._step_config = config, step or config
        """The second: where the units of a whole step are asked for."""
        self.whole = whole
        self._longest_prompt = longest_prompt
        self._stream = config.run.streams
        activations = Activations(config.memory.prefix_activations)
        self.recompute, self.layers = activations.again, activations.by_layers
        self.fused = config.device.kind == "cuda" and config.model.dtype == "bfloat16"
        self.shape = shape or read_shape(config.model.path)
        self.dtype = config.model.dtype
        self.on_gpu = config.device.kind == "cuda"
        self.pools = config.rollout.engine == "sglang"
        """Whether the engine keeps one pool of K/V for all units."""
        self.packed = packs_suffix(self.dtype, self.shape.head_dim, cuda=self.on_gpu)
        freeze = config.model.freeze_vision
        self.table = table or parameter_table(self.shape, dtype=self.dtype, freeze_vision=freeze)
        self.weights_bytes = self.rollout_weights_bytes = self.table.total_bytes
        """Of the storage that all map, and of a copy that an engine holds for itself."""
        self.gradient_bytes = gradient_table(self.table).total_bytes
        self.reference_bytes = reference_table(self.table).total_bytes
        optimizer = config.optimizer
        self.state_on_host = config.state_beside_gpu
        self.optimizer_bytes = optimizer_table(self.table, name=optimizer.name, momentum=optimizer.momentum).total_bytes
        self.copies = 1 if config.run.share_prefix else config.rollout.group_size

    @property
    def trained(self) -> ParameterTable:
        """The parameters that the trainer of a device steps."""
        return self.table

    @property
    def vocabulary(self) -> int:
        """Ids of the whole model."""
        return self.shape.vocab

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

    # --- exact sizes, of a unit in a step -------------------------------------------------------------------------

    def rollout_kv(self, prompts: Sequence[PromptSlot], sampling: Sampling, unit: int) -> Want:
        """K/V of one decode unit, training or evaluation."""
        training = sampling.temperature > 0
        phase = Phase.ROLLOUT if training else Phase.EVAL
        return Want(
            kind=Kind.ROLLOUT_KV,
            size_bytes=self._rollout_kv_bytes(
                len(prompts), _longest(prompts), sampling.group_size, _longest_response(sampling)
            ),
            owner=Role.ROLLOUT,
            last_consumer=Role.ROLLOUT,
            first=phase,
            last=phase,
            purpose=f"K/V of decode unit {unit}",
            reservation=ROLLOUT_KV,
        )

    def starting_pool(self) -> Want:
        """The pool that an engine comes up with, and gives back when it is loaded."""
        return Want(
            kind=Kind.ROLLOUT_KV,
            size_bytes=self._rollout_kv_bytes(0, 0, 0, 0),
            owner=Role.ROLLOUT,
            last_consumer=Role.ROLLOUT,
            first=Phase.LOAD,
            last=Phase.LOAD,
            purpose="K/V of the engine while it starts",
            reservation=ROLLOUT_KV,
        )

    def prefix_unit(self, which: Which, prompts: Sequence[PromptSlot], unit: int) -> tuple[Want, ...]:
        """What one prefix unit holds from its forward on: private memory first, if it needs any, then the actor's
        segment."""
        rows, tokens = len(prompts) * self.copies, _longest(prompts)
        if which is Which.REFERENCE:
            size = kv_bytes(self.shape, rows=rows, tokens=tokens, dtype=self.dtype)
            return (self._prefix(Kind.REFERENCE_PREFIX_KV, size, Phase.SCORE, f"reference K/V of prefix unit {unit}"),)
        segment = Want(
            kind=Kind.ACTOR_PREFIX_KV,
            size_bytes=kv_segment_bytes(self.shape, rows=rows, tokens=tokens, dtype=self.dtype),
            owner=Role.PREFIX,
            last_consumer=Role.TRAINER,
            first=Phase.ROLLOUT,
            last=Phase.TRAIN,
            purpose=f"actor K/V and gradients of prefix unit {unit}",
            segment=True,
        )
        if self.recompute:
            return (segment,)
        size, purpose = (
            self._activation_bytes(rows, tokens, _grids(prompts, self.copies)),
            f"activations of prefix unit {unit}",
        )
        return (self._prefix(Kind.PREFIX_ACTIVATIONS, size, Phase.TRAIN, purpose), segment)

    def backward_workspace(self, prompts: Sequence[PromptSlot], unit: int) -> Want | None:
        """Of a prefix unit's backward, which makes again what was not kept; None if everything was."""
        if not self.recompute:
            return None
        rows, tokens = len(prompts) * self.copies, _longest(prompts)
        return Want(
            kind=Kind.WORKSPACE,
            size_bytes=self._activation_bytes(rows, tokens, _grids(prompts, self.copies)),
            owner=Role.PREFIX,
            last_consumer=Role.PREFIX,
            first=Phase.ROLLOUT if self._stream else Phase.SCORE,
            last=Phase.TRAIN,
            purpose=f"backward of prefix unit {unit}",
            reservation=PREFIX_BACKWARD,
        )

    def score_workspace(self, responses: Sequence[Responses], unit: int) -> Want:
        """Scratch of one reference scoring."""
        lengths = [length for r in responses for length in r.lengths]
        return Want(
            kind=Kind.WORKSPACE,
            size_bytes=self._logits_bytes(len(responses) * self.copies, lengths),
            owner=Role.PREFIX,
            last_consumer=Role.PREFIX,
            first=Phase.ROLLOUT if self._stream else Phase.SCORE,
            last=Phase.SCORE,
            purpose=f"scoring of suffix unit {unit}",
            reservation=SCORE_WORKSPACE,
        )

    def train_workspace(
        self, prompts: Sequence[PromptSlot], responses: Sequence[Responses], unit: int
    ) -> tuple[Want, Want]:
        """Of one suffix unit: what its graph holds, and scratch for logits."""
        lengths = [length for r in responses for length in r.lengths]
        saved = self._suffix_bytes(len(responses) * self.copies, _longest(prompts), lengths)
        return (
            self._workspace(saved, f"graph of suffix unit {unit}"),
            self._workspace(self._logits_bytes(len(responses) * self.copies, lengths), f"logits of suffix unit {unit}"),
        )

    def whole_workspace(self, prompt: PromptSlot, responses: Responses) -> tuple[Want, Want]:
        """Of one whole sequence, the group's longest: what its graph holds, and scratch for logits."""
        longest = max(responses.lengths)
        grids = [(m.frames, m.height, m.width) for m in prompt.media]
        return (
            self._workspace(self._whole_bytes(prompt.tokens + longest, grids), "graph of a whole sequence"),
            self._workspace(self._whole_logits_bytes(longest), "logits of a whole sequence"),
        )

    # --- upper bounds, over the checked data ----------------------------------------------------------------------

    def bounds(self, data: DataChecked) -> dict[str, int]:
        """The largest that each kind of unit block can become, by name."""
        config = self._config
        train = data.sources[0]
        samples, longest = config.rollout.group_size, self._longest_response()
        tokens, prompts = train.max_prompt_tokens, config.prefix_prompts
        rows = prompts * self.copies
        # The one shape that a bound cannot know: media of unequal sizes cost an extra copy, so one odd image is added,
        # with sequences of another length than the others' in whole frames and in windows.
        width = max(2, train.max_media_rows // 2)
        grids = [(1, 2, width)] * (rows if train.max_media_rows else 0)
        grids += [(1, 2, 2) if width > 2 else (1, 4, 2)] if grids else []
        suffixes = self._suffixes(longest)
        suffix_rows = config.suffix_prompts * self.copies
        rollouts = [self._rollout_kv_bytes(config.decode_prompts, tokens, samples, longest)]
        rollouts += [
            self._rollout_kv_bytes(
                config.data.prompts_per_iteration, s.max_prompt_tokens, 1, config.rollout.max_new_tokens
            )
            for s in data.sources[1:]
        ]
        logits = max(self._logits_bytes(suffix_rows, n) for n in suffixes)
        training = logits + max(self._suffix_bytes(suffix_rows, tokens, n) for n in suffixes)
        if self.whole:
            one = [(1, 2, width), grids[-1]] if grids else []
            training = max(training, self._whole_bytes(tokens + longest, one) + self._whole_logits_bytes(longest))
        return {
            ROLLOUT_KV: max(rollouts),
            SCORE_WORKSPACE: logits,
            TRAIN_WORKSPACE: training,
            Kind.REFERENCE_PREFIX_KV: kv_bytes(self.shape, rows=rows, tokens=tokens, dtype=self.dtype),
            **self._scratch(rows, tokens, grids, suffixes),
            **self._engine_scratch(max(source.max_media_rows for source in data.sources)),
            PREFIX_BACKWARD if self.recompute else Kind.PREFIX_ACTIVATIONS: self._activation_bytes(rows, tokens, grids),
            Kind.ACTOR_PREFIX_KV: kv_segment_bytes(self.shape, rows=rows, tokens=tokens, dtype=self.dtype),
            Kind.INPUTS: max(self._inputs_bytes(config.data.prompts_per_iteration, s, data) for s in data.sources),
        }

    def _scratch(
        self, rows: int, tokens: int, grids: Sequence[Grid], suffixes: Sequence[Sequence[int]]
    ) -> dict[str, int]:
        """What a GPU's passes hold for a moment. On hosts `memory.overhead` covers it."""
        if not self.on_gpu:
            return {}
        trained = () if self._config.model.freeze_vision else grids
        prompts = self._config.suffix_prompts
        suffix = max(
            scratch_bytes(self.shape, tokens=sum(n), longest=-(-sum(n) // prompts), rows=1, dtype=self.dtype)
            for n in suffixes
        )
        prefix = scratch_bytes(
            self.shape, tokens=rows * tokens, longest=tokens, rows=rows, dtype=self.dtype, grids=trained
        )
        return {PREFIX_SCRATCH: max(prefix, suffix), TRAIN_SCRATCH: suffix}

    def _engine_scratch(self, media_rows: int) -> dict[str, int]:
        """media_rows: of the prompt with most patches; one prefill step encodes the pictures that it begins."""
        if not self.pools:
            return {}
        engine = self._config.rollout.sglang
        patches = media_rows + engine.prefill_tokens * self.shape.vision.merge**2 if media_rows else 0
        size_bytes = engine_scratch_bytes(
            self.shape,
            prefill_tokens=engine.prefill_tokens,
            patches=patches,
            running=engine.max_running,
            dtype=self.dtype,
        )
        return {ENGINE_SCRATCH: size_bytes}

    def _suffixes(self, longest: int) -> list[list[int]]:
        """Response lengths of the suffix units among which the largest is. With forced lengths those of every unit:
        there may be a long one in a group of short ones."""
        config = self._step_config
        samples, forced = config.rollout.group_size, config.rollout.forced_lengths
        if not forced:
            # Unequal lengths cost padding masks, those of the same length more tokens: the larger counts.
            full = [longest] * (config.suffix_prompts * samples)
            return [full, [*full[1:], max(1, longest - 1)]]
        units = plan_step(
            config.data.prompts_per_iteration,
            decode_prompts=config.decode_prompts,
            prefix_prompts=config.prefix_prompts,
            suffix_prompts=config.suffix_prompts,
        ).suffix
        return [
            [forced[(group * samples + sample) % len(forced)] for group in unit.groups for sample in range(samples)]
            for unit in units
        ]

    def whole_sequences(self, data: DataChecked, count: int) -> dict[str, int]:
        """Of a system without prefixes: what one pass over `count` sequences holds, each a longest prompt with a
        longest response. The pass keeps what `memory.prefix_activations` says."""
        train, longest = data.sources[0], self._longest_response()
        tokens = train.max_prompt_tokens + longest
        frame = [(1, 2, max(2, train.max_media_rows // 2))] * (count if train.max_media_rows else 0)
        scored = [longest] * count
        kept = (
            self._activation_bytes(count, tokens, frame) + count * longest * ITEM_BYTES[self.dtype] * self.shape.hidden
        )
        sizes = {"graph": kept, "logits": self._logits_bytes(count, scored)}
        if self.on_gpu:
            trained = () if self._config.model.freeze_vision else frame
            sizes["scratch"] = scratch_bytes(
                self.shape, tokens=count * tokens, longest=tokens, rows=count, dtype=self.dtype, grids=trained
            )
        return sizes

    def _longest_response(self) -> int:
        rollout = self._config.rollout
        return max(rollout.forced_lengths, default=rollout.max_new_tokens)

    # --- formulas -------------------------------------------------------------------------------------------------

    def _inputs_bytes(self, prompts: int, source: SourceChecked, data: DataChecked) -> int:
        """ids and three position rows (int64) and pixel rows (float32) of each prompt, each part 64-byte aligned."""
        numbers = source.max_prompt_tokens * 4 * 8 + source.max_media_rows * data.row_width * 4
        return prompts * (numbers + 64 * (2 + source.max_media_tokens))

    def _rollout_kv_bytes(self, prompts: int, tokens: int, samples: int, longest: int) -> int:
        match self._config.rollout.engine:
            case "replay":
                return 0
            case "sglang":
                pool = wire.engine_spec(self._step_config, max_prompt_tokens=self._longest_prompt).kv_tokens
                return pool_kv_bytes(self.shape, kv_tokens=pool, dtype=self.dtype)
            case "transformers":
                pass
        return rollout_kv_bytes(
            self.shape, rows=prompts, tokens=tokens, samples=samples, max_new_tokens=longest, dtype=self.dtype
        )

    def _activation_bytes(self, rows: int, tokens: int, grids: Sequence[Grid]) -> int:
        freeze, dtype, fused = self._config.model.freeze_vision, self.dtype, self.fused
        if self.layers:
            return sum(
                prefix_layers_bytes(
                    self.shape, rows=rows, tokens=tokens, grids=grids, freeze_vision=freeze, dtype=dtype, fused=fused
                )
            )
        return prefix_activation_bytes(
            self.shape, rows=rows, tokens=tokens, grids=grids, freeze_vision=freeze, dtype=dtype, fused=fused
        )

    def _suffix_bytes(self, prompts: int, tokens: int, lengths: Sequence[int]) -> int:
        if self.packed:
            return packed_suffix_saved_bytes(
                self.shape, prompts=prompts, lengths=lengths, entropy=True, dtype=self.dtype, fused=self.fused
            )
        return suffix_saved_bytes(
            self.shape,
            prompts=prompts,
            prefix_tokens=tokens,
            lengths=lengths,
            entropy=True,  # always measured, for the metrics
            dtype=self.dtype,
        )

    def _logits_bytes(self, prompts: int, lengths: Sequence[int]) -> int:
        return logits_bytes(self.shape, rows=scored_rows(prompts, lengths), dtype=self.dtype)

    def _whole_bytes(self, tokens: int, grids: Sequence[Grid]) -> int:
        return whole_saved_bytes(
            self.shape, tokens=tokens, grids=grids, freeze_vision=self._config.model.freeze_vision, dtype=self.dtype
        )

    def _whole_logits_bytes(self, longest: int) -> int:
        return whole_logits_bytes(self.shape, rows=longest, dtype=self.dtype)

    def _prefix(self, kind: Kind, size_bytes: int, last: Phase, purpose: str) -> Want:
        return Want(
            kind=kind,
            size_bytes=size_bytes,
            owner=Role.PREFIX,
            last_consumer=Role.PREFIX,
            first=Phase.ROLLOUT,
            last=last,
            purpose=purpose,
        )

    def _workspace(self, size_bytes: int, purpose: str) -> Want:
        return Want(
            kind=Kind.WORKSPACE,
            size_bytes=size_bytes,
            owner=Role.TRAINER,
            last_consumer=Role.TRAINER,
            first=Phase.ROLLOUT if self._stream else Phase.SCORE,
            last=Phase.TRAIN,
            purpose=purpose,
            reservation=TRAIN_WORKSPACE,
        )


def _longest(prompts: Sequence[PromptSlot]) -> int:
    return max(p.tokens for p in prompts)


def _grids(prompts: Sequence[PromptSlot], copies: int) -> list[Grid]:
    return [(m.frames, m.height, m.width) for p in prompts for m in p.media for _ in range(copies)]


def _longest_response(sampling: Sampling) -> int:
    return max(sampling.forced_lengths, default=sampling.max_new_tokens)
