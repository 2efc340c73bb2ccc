"""The configuration as the protocol's messages carry it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from rollplex.config import Config, dump, wire
from rollplex.config.learning import RewardFunctionSection
from rollplex.errors import ConfigError
from rollplex.protocol.common import ModelSpec
from rollplex.protocol.inputs import DataSource
from rollplex.protocol.reward import Form, RewardFunction
from rollplex.protocol.rollout import EngineSpec, Sampling
from rollplex.protocol.trainer import Algorithm, Loss, Optimizer, Scale

Make = Callable[..., Config]


def _over_the_wire(message: Any) -> Any:
    """Encoded and decoded with the limits of its type."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


def test_training_samples_as_configured(make: Make) -> None:
    config = make(
        run={"seed": 5},
        rollout={"group_size": 4, "max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 3},
    )
    assert _over_the_wire(wire.train_sampling(config, stop_ids=[2, 1])) == Sampling(
        seed=5,
        purpose="train",
        group_size=4,
        max_new_tokens=9,
        temperature=0.7,
        top_p=0.9,
        top_k=3,
        stop_ids=(2, 1),
    )


def test_an_engine_without_a_pool_is_told_its_name_only(make: Make) -> None:
    assert _over_the_wire(wire.engine_spec(make(run={"seed": 5}), max_prompt_tokens=70)) == EngineSpec(
        name="transformers", seed=5
    )
    rollout = {"engine": "replay", "replay": "/a.jsonl", "replay_s": 2.0}
    replayed = make(run={"seed": 5}, rollout=rollout, eval=[])
    assert wire.engine_spec(replayed, max_prompt_tokens=70) == EngineSpec(
        name="replay", seed=5, replay="/a.jsonl", replay_s=2.0
    )


def test_sglang_is_told_every_size(make: Make) -> None:
    rollout = {"engine": "sglang", "max_new_tokens": 9, "sglang": {"kv_tokens": 5000, "own_weights": True}}
    config = make(rollout=rollout, device={"kind": "cuda", "decode_share": 0.4}, model={"dtype": "bfloat16"})
    assert _over_the_wire(wire.engine_spec(config, max_prompt_tokens=70, private_bytes=3)) == EngineSpec(
        name="sglang",
        kv_tokens=5000,
        max_running=256,
        context_tokens=79,
        prefill_tokens=8192,
        private_bytes=3,
        decode_share=0.4,
        own_weights=True,
    )


def test_a_pool_that_does_not_hold_one_prompt_with_its_response_is_refused_with_the_sum(make: Make) -> None:
    rollout = {"engine": "sglang", "max_new_tokens": 9, "sglang": {"kv_tokens": 80}}
    config = make(rollout=rollout, device={"kind": "cuda"}, model={"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="at least 87: 70 \\+ 9 \\+ 8"):
        wire.engine_spec(config, max_prompt_tokens=70)
    assert wire.engine_spec(config, max_prompt_tokens=63).kv_tokens == 80


@pytest.mark.parametrize(
    ("decode_prompts", "forced", "responses"),
    [(0, (), 4 * 3 * 9), (2, (), 2 * 3 * 9), (0, (1, 2, 3), 4 * 6), (2, (1,) * 6 + (5,) * 6, 30), (1, (1, 9), 19)],
)
def test_a_pool_holds_every_prompt_once_and_all_responses_of_a_decode_batch(
    make: Make, decode_prompts: int, forced: tuple[int, ...], responses: int
) -> None:
    config = make(
        data={"prompts_per_iteration": 4},
        rollout={"engine": "sglang", "group_size": 3, "max_new_tokens": 9, "forced_lengths": list(forced)},
        batching={"decode_prompts": decode_prompts},
        device={"kind": "cuda"},
        model={"dtype": "bfloat16"},
    )
    prompts = decode_prompts or 4
    spare = (prompts + 3 * prompts + 1) * wire.POOL_SPARE_TOKENS
    assert wire.pool_tokens(config, max_prompt_tokens=70) == prompts * 70 + responses + spare
    assert wire.pool_tokens(config, max_prompt_tokens=1) >= 1 + 9 + wire.POOL_SPARE_TOKENS


def test_an_evaluation_is_greedy_with_one_response_and_no_forced_length(make: Make) -> None:
    config = make(rollout={"temperature": 0.7, "top_k": 3, "max_new_tokens": 9, "forced_lengths": [2]})
    assert _over_the_wire(wire.eval_sampling(config, "held_out", stop_ids=[1])) == Sampling(
        seed=0, purpose="eval:held_out", group_size=1, max_new_tokens=9, temperature=0.0, stop_ids=(1,)
    )


def test_the_trainer_gets_algorithm_and_optimizer(make: Make) -> None:
    config = make(
        run={"iterations": 7},
        rollout={"temperature": 0.5, "max_new_tokens": 3},
        algorithm={
            "loss": "gspo",
            "scale_rewards": "none",
            "clip_low": 0.1,
            "clip_high": 0.3,
            "kl": "k1",
            "beta": 0.5,
            "entropy_bonus": 0.01,
        },
        optimizer={
            "name": "sgd",
            "lr": 0.1,
            "momentum": 0.5,
            "weight_decay": 0.2,
            "max_grad_norm": 2,
            "schedule": "cosine",
            "warmup_steps": 2,
            "final_lr_ratio": 0.1,
        },
    )
    assert _over_the_wire(wire.algorithm(config)) == Algorithm(
        loss=Loss.GSPO,
        scale_rewards=Scale.NONE,
        clip_low=0.1,
        clip_high=0.3,
        kl="k1",
        beta=0.5,
        entropy_bonus=0.01,
        temperature=0.5,
        max_new_tokens=3,
    )
    assert _over_the_wire(wire.optimizer(config)) == Optimizer(
        name="sgd",
        lr=0.1,
        betas=(0.9, 0.999),
        eps=1e-8,
        momentum=0.5,
        weight_decay=0.2,
        max_grad_norm=2.0,
        schedule="cosine",
        warmup_steps=2,
        total_steps=7,
        final_lr_ratio=0.1,
    )


@pytest.mark.parametrize(
    ("loss", "scale"),
    [("grpo", "group"), ("dapo", "group"), ("gspo", "group"), ("dr_grpo", "none"), ("rloo", "none"), (None, "group")],
)
def test_what_advantages_are_divided_by_follows_from_the_loss_unless_it_is_given(
    make: Make, loss: str | None, scale: str
) -> None:
    given = {} if loss is None else {"loss": loss}
    config = make(algorithm=given)
    assert wire.algorithm(config).scale_rewards == config.algorithm.scale_rewards == scale
    assert f"scale_rewards: {scale}\n" in dump(config)
    for explicit in Scale:
        other = make(algorithm={**given, "scale_rewards": explicit})
        assert wire.algorithm(other).scale_rewards is other.algorithm.scale_rewards is explicit
        assert f"scale_rewards: {explicit}\n" in dump(other)


def test_the_training_data_come_first_among_the_sources(make: Make) -> None:
    config = make(data={"on_bad_row": "skip", "max_prompt_tokens": 50, "image_dir": "pictures"})
    common: dict[str, Any] = {"max_prompt_tokens": 50, "max_image_pixels": 16_777_216, "skip_bad_rows": True}
    assert _over_the_wire(wire.data_sources(config)[0]) == DataSource(
        name="train", path="rows.jsonl", image_dir="pictures", **common
    )
    assert wire.data_sources(config)[1:] == (
        DataSource(name="held_out", path="other/rows.jsonl", image_dir="other", **common),
    )


def test_reward_functions_keep_their_order_and_weights(make: Make) -> None:
    functions = [
        {"function": "a.b:f", "weight": 0.0},
        {"function": "x/y.py:g", "weight": -2.0},
        {"function": "x/y.py:h", "signature": "verl", "options": {"n": 1, "names": ["é", None]}},
    ]
    config = make(rewards={"functions": functions})
    assert wire.reward_functions(config) == (
        RewardFunction(spec="a.b:f", weight=0.0),
        RewardFunction(spec="x/y.py:g", weight=-2.0),
        RewardFunction(
            spec="x/y.py:h", weight=1.0, signature=Form.VERL, options='{"n": 1, "names": ["\\u00e9", null]}'
        ),
    )
    assert [function.name for function in config.rewards.functions] == ["f", "g", "h"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"no name": 1}, "'no name' is none"),
        ({"x": float("nan")}, "finite number"),
        ({"x": "y" * 70_000}, "at most 65536 characters"),
        ({"x": {1, 2}}, "valid JSON"),
    ],
)
def test_options_are_json_by_the_names_of_arguments(options: object, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RewardFunctionSection.model_validate({"function": "a.b:f", "options": options})


def test_every_process_gets_the_same_model(make: Make) -> None:
    config = make(model={"dtype": "bfloat16", "freeze_vision": True}, run={"threads": 2, "deterministic": False})
    assert _over_the_wire(wire.model_spec(config, table_hash="h", never_sampled=[3, 4])) == ModelSpec(
        path="model",
        dtype="bfloat16",
        freeze_vision=True,
        table_hash="h",
        never_sampled=(3, 4),
        threads=2,
        deterministic=False,
    )


@pytest.mark.parametrize("spec", ["f", "a.b", "a:", ":f", "a b:f", "1a:f", "a.py:", "x:y.py:f", "a:f(1)", "a-b:f"])
def test_what_names_no_function_is_refused(make: Make, spec: str) -> None:
    with pytest.raises(Exception, match="function"):
        make(rewards={"functions": [{"function": spec}]})


def test_how_rows_are_read_is_the_same_for_evaluations_but_for_the_split(make: Make) -> None:
    rows: dict[str, Any] = {"shape": "easyr1", "columns": {"problem": "q"}, "format_prompt": "{{ content }}!"}
    config = make(data={**rows, "split": "train"}, eval=[{"name": "held_out", "data": "other", "split": "test"}])
    train, held_out = (_over_the_wire(source) for source in wire.data_sources(config))
    assert (train.shape, train.columns, train.format_prompt) == ("easyr1", {"problem": "q"}, "{{ content }}!")
    assert (held_out.shape, held_out.columns, held_out.format_prompt) == ("easyr1", {"problem": "q"}, "{{ content }}!")
    assert (train.split, held_out.split) == ("train", "test")


def test_bounds_of_pixels_and_the_template_reach_every_dataset(make: Make) -> None:
    for source in wire.data_sources(make()):
        assert (source.min_pixels, source.max_pixels, source.chat_template) == (0, 0, "")
    for source in wire.data_sources(make(data={"min_pixels": 5, "max_pixels": 6000, "chat_template": "c.jinja"})):
        assert (source.min_pixels, source.max_pixels, source.chat_template) == (5, 6000, "c.jinja")


def test_how_videos_are_sampled_reaches_every_dataset(make: Make) -> None:
    for source in wire.data_sources(make(data={"video_fps": 0.5, "max_frames": 8})):
        assert (source.video_fps, source.max_frames) == (0.5, 8)
