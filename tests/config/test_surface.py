"""The keys of the configuration are public: adding one is deliberate, and each is explained."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel

from rollplex.config import Config
from rollplex.config.trackers import TrackersSection

KEYS = """
run.name run.seed run.iterations run.schedule run.alternate run.share_prefix run.deterministic run.threads
run.restarts run.tensorboard run.log_completions run.log_tokens run.keep_gradients run.sample_every run.sample_groups
model.path model.dtype model.freeze_vision
data.path data.split data.shape data.columns data.format_prompt data.image_dir data.prompts_per_iteration data.shuffle
data.max_prompt_tokens data.max_image_pixels data.min_pixels data.max_pixels data.chat_template data.on_bad_row
data.video_fps data.max_frames
rollout.engine rollout.group_size rollout.max_new_tokens rollout.temperature rollout.top_p rollout.top_k
rollout.stop_tokens rollout.never_sample rollout.forced_lengths rollout.replay rollout.replay_s
rollout.sglang.kv_tokens rollout.sglang.max_running rollout.sglang.prefill_tokens rollout.sglang.own_weights
rewards.functions rewards.functions.function rewards.functions.weight rewards.functions.signature
rewards.functions.options rewards.time_limit_s rewards.workers rewards.memory_limit rewards.on_error
algorithm.loss algorithm.scale_rewards algorithm.clip_low algorithm.clip_high algorithm.kl algorithm.beta
algorithm.entropy_bonus
optimizer.name optimizer.lr optimizer.betas optimizer.eps optimizer.momentum optimizer.weight_decay
optimizer.max_grad_norm optimizer.schedule optimizer.warmup_steps optimizer.final_lr_ratio
batching.decode_prompts batching.prefix_prompts batching.suffix_prompts
device.kind device.gpu device.sharing device.prefix_share device.decode_share device.window
parallel.devices parallel.training parallel.rollout parallel.placement parallel.rollout_devices
memory.budget memory.overhead memory.optimizer memory.prefix_activations
deadlines.start_s deadlines.ack_s deadlines.load_s deadlines.unit_s deadlines.update_s deadlines.checkpoint_s
deadlines.leave_s
http.host http.port http.allow_remote
checkpoint.every checkpoint.at_end checkpoint.keep
eval.name eval.data eval.split eval.image_dir eval.every eval.limit
services.rollout services.prefix services.trainer
trackers.wandb.project trackers.wandb.entity trackers.wandb.mode trackers.trackio.project
trackers.mlflow.experiment trackers.mlflow.uri
"""


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field.description
        for inner in _models(field.annotation):
            yield from _fields(inner, f"{prefix}{name}.")


def test_the_keys_are_the_known_ones() -> None:
    sections = {*Config.model_fields, "rollout.sglang", *(f"trackers.{name}" for name in TrackersSection.model_fields)}
    assert {path for path, _ in _fields(Config)} - sections == set(KEYS.split())


def test_every_key_is_explained_under_it() -> None:
    assert [path for path, description in _fields(Config) if not description] == []


def test_the_configuration_imports_no_torch() -> None:
    code = "import sys, rollplex.config.wire, rollplex.config.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
