"""The largest that each block of a unit can become, over the checked data: a plan that fits cannot fail later.

Owns: which unit is the largest that can come of the data. Sizes come from `formulas`; `unit_wants` has those of a unit
that is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.config.config import Config
from rollplex.memory.predict import Grid
from rollplex.protocol.common import Kind
from rollplex.protocol.inputs import DataChecked, SourceChecked
from rollplex_coordinator.decisions.plan import plan_step
from rollplex_coordinator.memory.formulas import Formulas
from rollplex_coordinator.memory.names import (
    ENGINE_SCRATCH,
    PREFIX_BACKWARD,
    PREFIX_SCRATCH,
    ROLLOUT_KV,
    SCORE_WORKSPACE,
    TRAIN_SCRATCH,
    TRAIN_WORKSPACE,
)


def rollout_bounds(formulas: Formulas, data: DataChecked) -> dict[str, int]:
    """Of what an engine holds, by name."""
    config = formulas.config
    train, *held_out = data.sources
    units = [
        formulas.rollout_kv(
            prompts=config.decode_prompts,
            tokens=train.max_prompt_tokens,
            samples=config.rollout.group_size,
            longest=config.rollout.longest_response,
        ),
        *(
            formulas.rollout_kv(
                prompts=config.data.prompts_per_iteration,
                tokens=source.max_prompt_tokens,
                samples=1,
                longest=config.rollout.max_new_tokens,
            )
            for source in held_out
        ),
    ]
    if not formulas.pools:
        return {ROLLOUT_KV: max(units)}
    media_rows = max(source.max_media_rows for source in data.sources)
    return {ROLLOUT_KV: max(units), ENGINE_SCRATCH: formulas.engine_scratch(media_rows)}


def pass_bounds(formulas: Formulas, data: DataChecked, *, copies: int, whole: bool) -> dict[str, int]:
    """Of what prefix and trainer hold of a unit, by name.

    Args:
        copies: of each prompt.
        whole: one whole sequence may be trained in the place of a suffix unit.
    """
    config, train = formulas.config, data.sources[0]
    tokens, longest = train.max_prompt_tokens, config.rollout.longest_response
    rows, suffix_rows = config.prefix_prompts * copies, config.suffix_prompts * copies
    grids = _grids(train.max_media_rows, rows)
    suffixes = _suffixes(formulas.step, longest)
    logits = max(formulas.logits(suffix_rows, lengths) for lengths in suffixes)
    training = logits + max(formulas.suffix(suffix_rows, tokens, lengths) for lengths in suffixes)
    if whole:
        one = [grids[0], grids[-1]] if grids else []
        training = max(training, formulas.whole(tokens + longest, one) + formulas.whole_logits(longest))
    return {
        SCORE_WORKSPACE: logits,
        TRAIN_WORKSPACE: training,
        Kind.REFERENCE_PREFIX_KV: formulas.reference_kv(rows, tokens),
        Kind.ACTOR_PREFIX_KV: formulas.actor_segment(rows, tokens),
        PREFIX_BACKWARD if formulas.recomputes else Kind.PREFIX_ACTIVATIONS: formulas.activations(rows, tokens, grids),
        **(_scratch(formulas, rows, tokens, grids, suffixes) if formulas.on_gpu else {}),
    }


def inputs_bound(config: Config, data: DataChecked) -> int:
    """Of the inputs of an iteration or an evaluation."""
    return max(_inputs_bytes(config.data.prompts_per_iteration, source, data.row_width) for source in data.sources)


def _grids(media_rows: int, rows: int) -> list[Grid]:
    """Of prompts with so many patches each. The one shape that a bound cannot know: media of unequal sizes cost an
    extra copy, so one odd image is added, with sequences of another length than the others' in whole frames and in
    windows."""
    if not media_rows:
        return []
    width = max(2, media_rows // 2)
    return [*[(1, 2, width)] * rows, (1, 2, 2) if width > 2 else (1, 4, 2)]


def _suffixes(step: Config, longest: int) -> list[list[int]]:
    """Response lengths of the suffix units among which the largest is. With forced lengths those of every unit: there
    may be a long one in a group of short ones."""
    samples, forced = step.rollout.group_size, step.rollout.forced_lengths
    if not forced:
        # Unequal lengths cost padding masks, those of the same length more tokens: the larger counts.
        full = [longest] * (step.suffix_prompts * samples)
        return [full, [*full[1:], max(1, longest - 1)]]
    units = plan_step(
        step.data.prompts_per_iteration,
        decode_prompts=step.decode_prompts,
        prefix_prompts=step.prefix_prompts,
        suffix_prompts=step.suffix_prompts,
    ).suffix
    return [
        [forced[(group * samples + sample) % len(forced)] for group in unit.groups for sample in range(samples)]
        for unit in units
    ]


def _scratch(
    formulas: Formulas, rows: int, tokens: int, grids: Sequence[Grid], suffixes: Sequence[Sequence[int]]
) -> dict[str, int]:
    samples = formulas.step.rollout.group_size

    def longest(lengths: Sequence[int]) -> int:
        """Responses of one prompt are the queries of one call."""
        return max(sum(lengths[start : start + samples]) for start in range(0, len(lengths), samples))

    suffix = max(formulas.scratch(rows=1, tokens=sum(n), longest=longest(n)) for n in suffixes)
    prefix = formulas.scratch(rows=rows, tokens=rows * tokens, longest=tokens, grids=grids)
    return {PREFIX_SCRATCH: max(prefix, suffix), TRAIN_SCRATCH: suffix}


def _inputs_bytes(prompts: int, source: SourceChecked, row_width: int) -> int:
    """ids and three position rows (int64) and pixel rows (float32) of each prompt, each part 64-byte aligned."""
    numbers = source.max_prompt_tokens * 4 * 8 + source.max_media_rows * row_width * 4
    return prompts * (numbers + 64 * (2 + source.max_media_tokens))
