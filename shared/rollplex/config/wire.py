"""What the configuration says, as the messages of `rollplex.protocol` carry it. Knows no files and no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollplex.config.checks import TRAIN
from rollplex.config.config import Config
from rollplex.errors import ConfigError
from rollplex.protocol.common import Memory, ModelSpec
from rollplex.protocol.inputs import DataSource
from rollplex.protocol.reward import RewardFunction
from rollplex.protocol.rollout import EngineSpec, Sampling
from rollplex.protocol.trainer import Algorithm, Optimizer

POOL_SPARE_TOKENS = 8
"""For each prompt and each response: SGLang keeps some tokens back."""


def model_spec(config: Config, *, table_hash: str, never_sampled: Sequence[int]) -> ModelSpec:
    """The model as every computing process must see it. `never_sampled`: ids, from DataChecked."""
    return ModelSpec(
        path=str(config.model.path),
        dtype=config.model.dtype,
        freeze_vision=config.model.freeze_vision,
        table_hash=table_hash,
        never_sampled=tuple(never_sampled),
        threads=config.run.threads,
        deterministic=config.run.deterministic,
        device=Memory(config.device.kind),
    )


def train_sampling(config: Config, *, stop_ids: Sequence[int]) -> Sampling:
    """How training responses are drawn. `stop_ids`: from DataChecked."""
    rollout = config.rollout
    return Sampling(
        seed=config.run.seed,
        purpose=TRAIN,
        group_size=rollout.group_size,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_ids=tuple(stop_ids),
        forced_lengths=rollout.forced_lengths,
    )


def engine_spec(config: Config, *, max_prompt_tokens: int, private_bytes: int = 0) -> EngineSpec:
    """The engine that samples, and how large it may become.

    Args:
        max_prompt_tokens: of all datasets, from DataChecked.
        private_bytes: of the engine's process beside its pool of K/V; 0: no limit.

    Raises:
        ConfigError: the pool that the configuration names does not hold one prompt with its response.
    """
    rollout = config.rollout
    replay = "" if rollout.replay is None else str(rollout.replay)
    if rollout.engine != "sglang":
        return EngineSpec(
            name=rollout.engine,
            private_bytes=private_bytes,
            seed=config.run.seed,
            replay=replay,
            replay_s=rollout.replay_s,
        )
    context = max_prompt_tokens + rollout.max_new_tokens
    least = context + POOL_SPARE_TOKENS
    if 0 < rollout.sglang.kv_tokens < least:
        raise ConfigError(
            "The pool of keys and values does not hold the longest prompt with its response",
            got=f"{rollout.sglang.kv_tokens} tokens",
            needed=f"at least {least}: {max_prompt_tokens} + {rollout.max_new_tokens} + {POOL_SPARE_TOKENS}",
            do="Raise rollout.sglang.kv_tokens, set it to 0, or lower rollout.max_new_tokens.",
            where="rollout.sglang.kv_tokens",
        )
    return EngineSpec(
        name=rollout.engine,
        kv_tokens=rollout.sglang.kv_tokens or pool_tokens(config, max_prompt_tokens=max_prompt_tokens),
        max_running=rollout.sglang.max_running,
        context_tokens=context,
        prefill_tokens=rollout.sglang.prefill_tokens,
        private_bytes=private_bytes,
        decode_share=config.device.decode_share,
        seed=config.run.seed,
        own_weights=rollout.sglang.own_weights,
    )


def pool_tokens(config: Config, *, max_prompt_tokens: int) -> int:
    """Tokens of K/V with which no response of a decode batch has to wait: each prompt once, all responses, and some
    to spare; at least one prompt with the longest response."""
    rollout, prompts = config.rollout, config.decode_prompts
    samples, forced = rollout.group_size, rollout.forced_lengths
    every = config.data.prompts_per_iteration * samples
    lengths = [forced[index % len(forced)] for index in range(every)] if forced else [rollout.max_new_tokens] * every
    batch = prompts * samples
    responses = max(sum(lengths[start : start + batch]) for start in range(0, every, batch))
    spare = (prompts + batch + 1) * POOL_SPARE_TOKENS
    least = max_prompt_tokens + rollout.max_new_tokens + POOL_SPARE_TOKENS
    return max(prompts * max_prompt_tokens + responses + spare, least)


def eval_sampling(config: Config, name: str, *, stop_ids: Sequence[int]) -> Sampling:
    """How the responses of evaluation `name` are drawn: greedily, one per prompt."""
    return Sampling(
        seed=config.run.seed,
        purpose=f"eval:{name}",
        group_size=1,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=0.0,
        stop_ids=tuple(stop_ids),
    )


def algorithm(config: Config) -> Algorithm:
    """Advantages and loss for the trainer."""
    section = config.algorithm
    return Algorithm(
        loss=section.loss,
        scale_rewards=section.scale_rewards,
        clip_low=section.clip_low,
        clip_high=section.clip_high,
        kl=section.kl,
        beta=section.beta,
        entropy_bonus=section.entropy_bonus,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def optimizer(config: Config) -> Optimizer:
    """Optimizer and schedule for the trainer. The schedule ends with the run."""
    section = config.optimizer
    return Optimizer(
        name=section.name,
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        schedule=section.schedule,
        warmup_steps=section.warmup_steps,
        total_steps=config.run.iterations,
        final_lr_ratio=section.final_lr_ratio,
        streamed=config.memory.optimizer == "host",
    )


def data_sources(config: Config) -> tuple[DataSource, ...]:
    """The training data ("train") first, then each evaluation's."""
    data = config.data
    places = [(TRAIN, data.path, data.split, data.image_folder)]
    places += [(item.name, item.data, item.split, item.image_folder) for item in config.eval]
    return tuple(
        DataSource(
            name=name,
            path=str(path),
            image_dir=str(images),
            max_prompt_tokens=data.max_prompt_tokens,
            max_image_pixels=data.max_image_pixels,
            skip_bad_rows=data.on_bad_row == "skip",
            split=split,
            shape=data.shape,
            columns=data.columns,
            format_prompt=data.format_prompt,
            chat_template="" if data.chat_template is None else str(data.chat_template),
            min_pixels=data.min_pixels,
            max_pixels=data.max_pixels,
            video_fps=data.video_fps,
            max_frames=data.max_frames,
        )
        for name, path, split, images in places
    )


def reward_functions(config: Config) -> tuple[RewardFunction, ...]:
    """The reward functions in the order of the configuration."""
    return tuple(
        RewardFunction(
            spec=item.function, weight=item.weight, signature=item.signature, options=json.dumps(item.options)
        )
        for item in config.rewards.functions
    )
