"""What a configuration makes of the formulas of `rollplex.memory.predict`: bytes of one share of a model.

Owns: which formula a configuration calls for (packed or padded, fused or not, layers kept or all, whose K/V), and with
which of its values. Does not know: units of a step, data, who holds the bytes and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.config import wire
from rollplex.config.config import Config
from rollplex.layout.shape import ModelShape
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
from rollplex.protocol.prefix import Activations


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """Bytes by rows, tokens and pictures."""

    config: Config
    """Of a whole iteration, or of the share that a replica or an engine has of one."""
    step: Config
    """Of the whole iteration."""
    shape: ModelShape
    """Of the model, or of a tensor-parallel rank's share of it."""
    longest_prompt: int = 0
    """Tokens, over all data; only for an engine that keeps one pool of K/V for all units."""

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return self.config.model.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether passes run on a GPU."""
        return self.config.device.kind == "cuda"

    @property
    def fused(self) -> bool:
        """Whether by the modules of `rollplex.model.fused`."""
        return self.on_gpu and self.dtype == "bfloat16"

    @property
    def pools(self) -> bool:
        """Whether the engine keeps one pool of K/V for all units."""
        return self.config.rollout.engine == "sglang"

    @property
    def recomputes(self) -> bool:
        """Whether a prefix unit's backward makes again what was not kept."""
        return Activations(self.config.memory.prefix_activations).again

    def rollout_kv(self, *, prompts: int, tokens: int, samples: int, longest: int) -> int:
        """Of one decode unit; of an engine with a pool, of that."""
        match self.config.rollout.engine:
            case "replay":
                return 0
            case "sglang":
                pool = wire.engine_spec(self.step, max_prompt_tokens=self.longest_prompt).kv_tokens
                return pool_kv_bytes(self.shape, kv_tokens=pool, dtype=self.dtype)
            case "transformers":
                pass
        return rollout_kv_bytes(
            self.shape, rows=prompts, tokens=tokens, samples=samples, max_new_tokens=longest, dtype=self.dtype
        )

    def engine_scratch(self, media_rows: int) -> int:
        """media_rows: of the prompt with most patches; one prefill step encodes the pictures that it begins."""
        engine = self.config.rollout.sglang
        patches = media_rows + engine.prefill_tokens * self.shape.vision.merge**2 if media_rows else 0
        return engine_scratch_bytes(
            self.shape,
            prefill_tokens=engine.prefill_tokens,
            patches=patches,
            running=engine.max_running,
            ranks=self.config.parallel.rollout,
            dtype=self.dtype,
        )

    def reference_kv(self, rows: int, tokens: int) -> int:
        """K, V and last hidden state of a prefix unit."""
        return kv_bytes(self.shape, rows=rows, tokens=tokens, dtype=self.dtype)

    def actor_segment(self, rows: int, tokens: int) -> int:
        """The same, and the gradients of all of it."""
        return kv_segment_bytes(self.shape, rows=rows, tokens=tokens, dtype=self.dtype)

    def activations(self, rows: int, tokens: int, grids: Sequence[Grid]) -> int:
        """What a prefix unit's graph holds while its backward is awaited or, if it recomputes, runs."""
        freeze, dtype, fused = self.config.model.freeze_vision, self.dtype, self.fused
        if Activations(self.config.memory.prefix_activations).by_layers:
            return sum(
                prefix_layers_bytes(
                    self.shape, rows=rows, tokens=tokens, grids=grids, freeze_vision=freeze, dtype=dtype, fused=fused
                )
            )
        return prefix_activation_bytes(
            self.shape, rows=rows, tokens=tokens, grids=grids, freeze_vision=freeze, dtype=dtype, fused=fused
        )

    def suffix(self, prompts: int, tokens: int, lengths: Sequence[int]) -> int:
        """What a suffix unit's graph holds.

        Args:
            tokens: of the longest prompt.
            lengths: of all responses.
        """
        if packs_suffix(self.dtype, self.shape.head_dim, cuda=self.on_gpu):
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

    def logits(self, prompts: int, lengths: Sequence[int]) -> int:
        """Scratch of a suffix unit's logits."""
        return logits_bytes(self.shape, rows=scored_rows(prompts, lengths), dtype=self.dtype)

    def scratch(self, *, rows: int, tokens: int, longest: int, grids: Sequence[Grid] = ()) -> int:
        """What a pass on a GPU holds for a moment. On hosts `memory.overhead` covers it.

        Args:
            tokens: of all rows.
            longest: tokens of the longest.
        """
        trained = () if self.config.model.freeze_vision else grids
        return scratch_bytes(self.shape, tokens=tokens, longest=longest, rows=rows, dtype=self.dtype, grids=trained)

    def whole(self, tokens: int, grids: Sequence[Grid]) -> int:
        """What the graph of one whole sequence holds."""
        return whole_saved_bytes(
            self.shape, tokens=tokens, grids=grids, freeze_vision=self.config.model.freeze_vision, dtype=self.dtype
        )

    def whole_logits(self, longest: int) -> int:
        """Scratch of its logits, of a response of so many tokens."""
        return whole_logits_bytes(self.shape, rows=longest, dtype=self.dtype)
