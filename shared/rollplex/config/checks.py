"""The rules that concern several keys. Each raises a ConfigError whose `where` is the key path to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rollplex.errors import ConfigError
from rollplex.protocol.trainer import Scale

if TYPE_CHECKING:
    from rollplex.config.config import Config

TRAIN = "train"
"""The name of the training data among the data sources; evaluations may not take it."""
SGLANG_DEVICES = frozenset({"cuda"})
"""What SGLang runs on. Tests add the host, where it runs on stand-ins for its kernels."""
SGLANG_COLDEST = 1e-6
"""The lowest temperature that SGLang divides by."""


def check(config: Config) -> None:
    """Check what single fields cannot.

    Raises:
        ConfigError: the first broken rule.
    """
    _check_schedule(config)
    _check_pixels(config)
    _check_tokens(config)
    _check_engine(config)
    _check_device(config)
    _check_parallel(config)
    _check_rewards(config)
    _check_optimizer(config)
    _check_batching(config)
    _check_memory(config)
    _check_http(config)
    _check_eval(config)


def _check_schedule(config: Config) -> None:
    if config.run.streams and config.algorithm.scale_rewards is Scale.BATCH:
        raise ConfigError(
            "With the stream schedule a group is trained before the rewards of the others are known",
            got="scale_rewards: batch with schedule: stream",
            needed="an advantage that depends on its own group only",
            do="Set algorithm.scale_rewards to group or none, or run.schedule to serial or overlap.",
            where="algorithm.scale_rewards",
        )


def _check_parallel(config: Config) -> None:
    """Whether there are devices for everybody. What the model can be split by is known once it is read."""
    parallel = config.parallel
    apart = parallel.placement == "disaggregated"
    if apart != bool(parallel.rollout_devices):
        raise ConfigError(
            "Devices that only sample belong to a disaggregated placement, and to no other",
            got=f"placement: {parallel.placement} with rollout_devices: {parallel.rollout_devices}",
            needed="1 or more with disaggregated, 0 with colocated",
            do="Change parallel.placement, or parallel.rollout_devices.",
            where="parallel.rollout_devices",
        )
    if parallel.rollout_devices >= parallel.devices:
        raise ConfigError(
            "No device is left to train on",
            got=f"{parallel.rollout_devices} of {parallel.devices} devices only sample",
            needed=f"at most {parallel.devices - 1}",
            do="Lower parallel.rollout_devices, or raise parallel.devices.",
            where="parallel.rollout_devices",
        )
    if parallel.devices > 1 and config.rollout.sglang.own_weights:
        raise ConfigError(
            "Weights of the rollout's own are compared with shared ones on one device",
            got=f"rollout.sglang.own_weights: true with parallel.devices: {parallel.devices}",
            needed="one device; copies on devices of their own are placement: disaggregated",
            do="Take rollout.sglang.own_weights out, or set parallel.devices to 1.",
            where="rollout.sglang.own_weights",
        )
    _check_shares(config)
    _check_engine_ranks(config)
    border = parallel.devices - parallel.rollout_devices
    sides = [("training", parallel.training, border), ("rollout", parallel.rollout, parallel.rollout_devices or border)]
    for name, degree, devices in sides:
        if devices % degree:
            raise ConfigError(
                "The devices do not hold whole tensor-parallel groups",
                got=f"{devices} devices / {degree} ranks = {devices / degree:g}",
                needed="a whole number",
                do=f"Change parallel.{name}, parallel.devices or parallel.rollout_devices.",
                where=f"parallel.{name}",
            )


def _check_engine_ranks(config: Config) -> None:
    """SGLang takes a parameter as one tensor, which a wider training shard on the same device does not always hold."""
    parallel = config.parallel
    if config.rollout.engine == "sglang" and not parallel.rollout_devices and parallel.rollout > parallel.training:
        raise ConfigError(
            "SGLang's engine has no more ranks than training where both use the same devices",
            got=f"parallel.rollout: {parallel.rollout} over parallel.training: {parallel.training}",
            needed="parallel.rollout of at most parallel.training, or placement: disaggregated",
            do="Lower parallel.rollout, raise parallel.training, or set rollout.engine to transformers.",
            where="parallel.rollout",
        )


def _check_shares(config: Config) -> None:
    """What ranks give each other by NCCL does not keep to a part of a GPU's multiprocessors."""
    parallel, device = config.parallel, config.device
    sides = (
        ("prefix_share", device.prefix_share, "training", parallel.training),
        ("decode_share", device.decode_share, "rollout", parallel.rollout),
    )
    for key, share, side, degree in sides:
        if device.kind == "cuda" and share < 1.0 and degree > 1:
            raise ConfigError(
                "Ranks that work together cannot keep to a share of a GPU's multiprocessors",
                got=f"device.{key}: {share:g} with parallel.{side}: {degree}",
                needed="1.0, or a degree of 1",
                do=f"Take device.{key} out, or set parallel.{side} to 1.",
                where=f"device.{key}",
            )


def _check_pixels(config: Config) -> None:
    data = config.data
    if data.max_pixels and data.min_pixels > data.max_pixels:
        raise ConfigError(
            "No image could have so many pixels",
            got=f"min_pixels {data.min_pixels}, max_pixels {data.max_pixels}",
            do="Lower data.min_pixels, or raise data.max_pixels.",
            where="data.min_pixels",
        )


def _check_tokens(config: Config) -> None:
    rollout = config.rollout
    for key, tokens in (("stop_tokens", rollout.stop_tokens), ("never_sample", rollout.never_sample)):
        if twice := _repeated(tokens):
            raise ConfigError("A token is listed twice", got=repr(twice), do="Take one out.", where=f"rollout.{key}")
    if both := sorted(set(rollout.stop_tokens) & set(rollout.never_sample)):
        raise ConfigError(
            "A stop token that is never sampled cannot stop a response",
            got=f"{both[0]!r} in both lists",
            do="Take it out of rollout.never_sample or out of rollout.stop_tokens.",
            where="rollout.never_sample",
        )
    if rollout.forced_lengths and max(rollout.forced_lengths) > rollout.max_new_tokens:
        raise ConfigError(
            "A forced length is greater than the longest response",
            got=str(max(rollout.forced_lengths)),
            needed=f"at most rollout.max_new_tokens = {rollout.max_new_tokens}",
            do="Lower it, or raise rollout.max_new_tokens.",
            where="rollout.forced_lengths",
        )


def _check_engine(config: Config) -> None:
    rollout = config.rollout
    if rollout.engine == "replay" and rollout.replay is None:
        raise ConfigError(
            "The engine replay needs recorded responses",
            needed="a completions.jsonl that was written with run.log_tokens: true",
            do="Set rollout.replay to that file.",
            where="rollout.replay",
        )
    if rollout.engine != "replay" and (rollout.replay is not None or rollout.replay_s):
        key = "replay_s" if rollout.replay is None else "replay"
        raise ConfigError(
            "Recorded responses are for the engine replay",
            got=f"rollout.engine: {rollout.engine}",
            do=f"Set rollout.engine to replay, or take rollout.{key} out.",
            where=f"rollout.{key}",
        )
    if rollout.engine == "replay" and config.eval:
        raise ConfigError(
            "A replay samples nothing, so that it cannot be evaluated: its responses are those of training",
            got=f"rollout.engine: replay with {len(config.eval)} evaluations",
            needed="none",
            do="Take eval out (--set eval=[]), or evaluate with the engine that recorded.",
            where="eval",
        )
    _check_sglang(config)


def _check_sglang(config: Config) -> None:
    rollout = config.rollout
    if rollout.sglang.own_weights and rollout.engine != "sglang":
        raise ConfigError(
            "Only SGLang can hold weights of its own",
            got=f"rollout.engine: {rollout.engine}",
            do="Set rollout.engine to sglang, or take rollout.sglang.own_weights out.",
            where="rollout.sglang.own_weights",
        )
    if rollout.engine == "sglang" and rollout.temperature < SGLANG_COLDEST:
        raise ConfigError(
            "SGLang samples greedily at such a temperature, and tells log-probabilities at temperature 1",
            got=f"{rollout.temperature:g}",
            needed=f"at least {SGLANG_COLDEST:g}",
            do="Raise rollout.temperature, or set rollout.engine to transformers.",
            where="rollout.temperature",
        )
    if rollout.engine == "sglang" and rollout.top_k == 1 and rollout.temperature != 1.0:
        raise ConfigError(
            "SGLang takes the most probable id without dividing logits, and tells log-probabilities at temperature 1",
            got=f"top_k: 1 with temperature: {rollout.temperature:g}",
            do="Set rollout.temperature to 1 or rollout.top_k to something else, or rollout.engine to transformers.",
            where="rollout.top_k",
        )


def _check_device(config: Config) -> None:
    on_gpu, dtype = config.device.kind == "cuda", config.model.dtype
    if on_gpu and dtype == "float64":
        raise ConfigError(
            "float64 is for tests of the mathematics, on host memory",
            got="model.dtype: float64 with device.kind: cuda",
            needed="bfloat16 or float32",
            do="Set model.dtype to bfloat16, or device.kind to host.",
            where="model.dtype",
        )
    if config.rollout.engine == "sglang" and config.device.kind not in SGLANG_DEVICES:
        raise ConfigError(
            "SGLang needs a GPU",
            got=f"rollout.engine: sglang with device.kind: {config.device.kind}",
            do="Set device.kind to cuda, or rollout.engine to transformers.",
            where="rollout.engine",
        )
    if config.rollout.engine == "sglang" and dtype != "bfloat16":
        raise ConfigError(
            "SGLang samples from bfloat16 weights",
            got=f"rollout.engine: sglang with model.dtype: {dtype}",
            needed="weights that it can map as they are",
            do="Set model.dtype to bfloat16, or rollout.engine to transformers.",
            where="model.dtype",
        )


def _check_rewards(config: Config) -> None:
    functions = config.rewards.functions
    if twice := _repeated(function.name for function in functions):
        raise ConfigError(
            "Two reward functions have one name, under which both would be reported",
            got=repr(twice),
            do="Rename one of the functions.",
            where="rewards.functions",
        )
    if all(function.weight == 0.0 for function in functions):
        raise ConfigError(
            "No reward function has a weight, so there is nothing to learn from",
            got="weight: 0 for all",
            do="Give one of them a weight other than 0.",
            where="rewards.functions",
        )


def _check_optimizer(config: Config) -> None:
    optimizer = config.optimizer
    if optimizer.name == "adamw" and optimizer.momentum:
        raise ConfigError(
            "AdamW does not use momentum",
            got=str(optimizer.momentum),
            do="Take it out and set optimizer.betas, or set optimizer.name to sgd.",
            where="optimizer.momentum",
        )
    if optimizer.warmup_steps > config.run.iterations:
        raise ConfigError(
            "Warm-up is longer than the run",
            got=str(optimizer.warmup_steps),
            needed=f"at most run.iterations = {config.run.iterations}",
            do="Lower it, or raise run.iterations.",
            where="optimizer.warmup_steps",
        )


def _check_batching(config: Config) -> None:
    batching, prompts = config.batching, config.data.prompts_per_iteration
    for key, size in (
        ("decode_prompts", batching.decode_prompts),
        ("prefix_prompts", batching.prefix_prompts),
        ("suffix_prompts", batching.suffix_prompts),
    ):
        if size > prompts:
            raise ConfigError(
                "A batch is larger than the iteration",
                got=str(size),
                needed=f"at most data.prompts_per_iteration = {prompts}",
                do="Lower it, or set 0 for all prompts.",
                where=f"batching.{key}",
            )
    if config.prefix_prompts % config.suffix_prompts:
        raise ConfigError(
            "A suffix batch would reach over the end of its prefix batch",
            got=f"{config.suffix_prompts}",
            needed=f"a divisor of the prefix batch, {config.prefix_prompts} prompts",
            do="Change batching.suffix_prompts, or batching.prefix_prompts.",
            where="batching.suffix_prompts",
        )


def _check_memory(config: Config) -> None:
    budget, overhead = config.memory.budget, config.overhead_bytes
    if budget is not None and overhead >= budget:
        raise ConfigError(
            "The overhead leaves nothing of the memory budget",
            got=f"{budget:,} bytes of budget, {overhead:,} bytes of overhead",
            do="Raise memory.budget, or lower memory.overhead.",
            where="memory.budget",
        )


def _check_http(config: Config) -> None:
    if not config.http.is_loopback and not config.http.allow_remote:
        raise ConfigError(
            "The control API would be reachable from other machines",
            got=repr(config.http.host),
            needed="a loopback address such as 127.0.0.1",
            do="Change it, or set http.allow_remote to true if that is what you want.",
            where="http.host",
        )


def _check_eval(config: Config) -> None:
    names = [evaluation.name for evaluation in config.eval]
    if twice := _repeated([TRAIN, *names]):
        raise ConfigError(
            f"{twice!r} is the name of the training data" if twice == TRAIN else "Two evaluations have one name",
            got=repr(twice),
            needed="a name of its own for each (without one, an evaluation has that of its data's file)",
            do=f"Set `name` in the entry of eval, for example name: {twice}_2.",
            where="eval",
        )


def _repeated(items: Iterable[str]) -> str | None:
    """The first item that comes twice."""
    return next((item for item, count in Counter(items).items() if count > 1), None)
