"""Rules about several keys, and what follows from several keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.errors import ConfigError

Make = Callable[..., Config]
_TWO = {"functions": [{"function": "a:f", "weight": 0.0}, {"function": "b:f"}]}
_NO_WEIGHT = {"functions": [{"function": "a:f", "weight": 0.0}, {"function": "b:g", "weight": 0}]}
_ANYWHERE = "0.0.0.0"  # noqa: S104 - what is to be refused
_GPU = {"kind": "cuda"}
_HALF = {"path": "m", "dtype": "bfloat16"}
_SGLANG = {"device": _GPU, "model": _HALF}
_OWN = {"engine": "sglang", "sglang": {"own_weights": True}}
_EVAL = {"name": "e", "data": "x.jsonl"}
_APART = {"placement": "disaggregated"}


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"run": {"schedule": "stream"}, "algorithm": {"scale_rewards": "batch"}}, "algorithm.scale_rewards"),
        (
            {"run": {"alternate": ["serial", "stream"]}, "algorithm": {"scale_rewards": "batch"}},
            "algorithm.scale_rewards",
        ),
        ({"data": {"min_pixels": 5001, "max_pixels": 5000}}, "data.min_pixels"),
        ({"rollout": {"stop_tokens": ["a"], "never_sample": ["b", "a"]}}, "rollout.never_sample"),
        ({"rollout": {"stop_tokens": ["a", "a"]}}, "rollout.stop_tokens"),
        ({"rollout": {"never_sample": ["a", "a"]}}, "rollout.never_sample"),
        ({"rollout": {"max_new_tokens": 4, "forced_lengths": [1, 5]}}, "rollout.forced_lengths"),
        ({"rollout": {"engine": "replay"}}, "rollout.replay"),
        ({"rollout": {"replay": "a.jsonl"}}, "rollout.replay"),
        ({"rollout": {"replay_s": 1.0}}, "rollout.replay_s"),
        ({"rollout": {"engine": "replay", "replay": "a.jsonl"}, "eval": [_EVAL]}, "eval"),
        ({"rollout": {"sglang": {"own_weights": True}}}, "rollout.sglang.own_weights"),
        ({"rollout": {"engine": "sglang"}, "model": _HALF}, "rollout.engine"),
        ({**_SGLANG, "rollout": {"engine": "sglang", "temperature": 1e-7}}, "rollout.temperature"),
        ({**_SGLANG, "rollout": {"engine": "sglang", "temperature": 0.7, "top_k": 1}}, "rollout.top_k"),
        ({"rollout": {"engine": "sglang"}, "device": _GPU}, "model.dtype"),
        ({"device": _GPU, "model": {"path": "m", "dtype": "float64"}}, "model.dtype"),
        ({"device": _GPU, "memory": {"budget": "8GiB"}}, "memory.budget"),
        ({"parallel": {"devices": 2}, "device": _GPU, "model": _HALF, "rollout": _OWN}, "rollout.sglang.own_weights"),
        ({"parallel": {"devices": 2}, "device": _GPU, "memory": {"budget": "16GiB"}}, "memory.budget"),
        ({"parallel": {"devices": 2, "training": 2}, "device": {**_GPU, "prefix_share": 0.5}}, "device.prefix_share"),
        ({"parallel": {"devices": 2, "rollout": 2}, "device": {**_GPU, "decode_share": 0.5}}, "device.decode_share"),
        (
            {
                "parallel": {"devices": 2, "rollout": 2},
                "device": _GPU,
                "model": _HALF,
                "rollout": {"engine": "sglang"},
            },
            "parallel.rollout",
        ),
        ({"parallel": {"devices": 3, "training": 2}}, "parallel.training"),
        ({"parallel": {"devices": 2, "rollout": 4}}, "parallel.rollout"),
        ({"parallel": {"devices": 4, "rollout_devices": 2}}, "parallel.rollout_devices"),
        ({"parallel": {"devices": 4, "placement": "disaggregated"}}, "parallel.rollout_devices"),
        ({"parallel": {"devices": 2, **_APART, "rollout_devices": 2}}, "parallel.rollout_devices"),
        ({"parallel": {"devices": 4, **_APART, "rollout_devices": 2, "training": 4}}, "parallel.training"),
        ({"parallel": {"devices": 4, **_APART, "rollout_devices": 1, "rollout": 2}}, "parallel.rollout"),
        ({"rewards": _TWO}, "rewards.functions"),
        ({"rewards": _NO_WEIGHT}, "rewards.functions"),
        ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum"),
        ({"optimizer": {"warmup_steps": 11}, "run": {"iterations": 10}}, "optimizer.warmup_steps"),
        ({"batching": {"decode_prompts": 9}}, "batching.decode_prompts"),
        ({"batching": {"prefix_prompts": 9}}, "batching.prefix_prompts"),
        ({"batching": {"suffix_prompts": 9}}, "batching.suffix_prompts"),
        ({"batching": {"prefix_prompts": 4, "suffix_prompts": 3}}, "batching.suffix_prompts"),
        ({"batching": {"prefix_prompts": 4, "suffix_prompts": 8}}, "batching.suffix_prompts"),
        ({"batching": {"suffix_prompts": 3}}, "batching.suffix_prompts"),
        ({"memory": {"budget": "1GiB", "overhead": "1GiB"}}, "memory.budget"),
        ({"http": {"host": _ANYWHERE}}, "http.host"),
        ({"http": {"host": "example.org"}}, "http.host"),
        ({"http": {"host": "::"}}, "http.host"),
        ({"eval": [_EVAL, _EVAL]}, "eval"),
        ({"eval": [_EVAL | {"name": "train"}]}, "eval"),
    ],
)
def test_a_contradiction_is_refused_and_names_the_key(make: Make, sections: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**sections)
    assert caught.value.where == where
    assert caught.value.do


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"schedule": "stream"}, "algorithm": {"scale_rewards": "group"}},
        {"run": {"schedule": "overlap"}, "algorithm": {"scale_rewards": "batch"}},
        {"rollout": {"stop_tokens": ["a"], "never_sample": ["b"]}},
        {"rollout": {"engine": "replay", "replay": "a.jsonl", "replay_s": 1.0}, "eval": []},
        {"rollout": {"engine": "sglang", "sglang": {"own_weights": True}}, "device": _GPU, "model": _HALF},
        {"device": _GPU, "model": {"path": "m", "dtype": "float32"}},
        {**_SGLANG, "rollout": {"engine": "sglang", "temperature": 1.0, "top_k": 1}},
        {**_SGLANG, "rollout": {"engine": "sglang", "temperature": 1e-6, "top_k": 2}},
        {"rollout": {"temperature": 1e-7, "top_k": 1}},
        {"device": _GPU, "memory": {"budget": "9GiB"}},
        {"parallel": {"devices": 2, "training": 2}, "device": _GPU, "model": _HALF, "rollout": {"engine": "sglang"}},
        {
            "parallel": {"devices": 2, "training": 2, "rollout": 2},
            "device": _GPU,
            "model": _HALF,
            "rollout": {"engine": "sglang"},
        },
        {"parallel": {"devices": 2}, "device": {**_GPU, "prefix_share": 0.5, "decode_share": 0.5}},
        {"parallel": {"devices": 2, **_APART, "rollout_devices": 1}, "device": _GPU, "memory": {"budget": "17GiB"}},
        {"parallel": {"devices": 4, "training": 4, "rollout": 2}},
        {"parallel": {"devices": 4, **_APART, "rollout_devices": 2, "training": 2}},
        {"parallel": {"devices": 3, **_APART, "rollout_devices": 1, "training": 2}},
        {"rollout": {"max_new_tokens": 4, "forced_lengths": [4, 1]}},
        {"optimizer": {"name": "sgd", "momentum": 0.9}},
        {"optimizer": {"warmup_steps": 10}, "run": {"iterations": 10}},
        {"batching": {"prefix_prompts": 4, "suffix_prompts": 2}},
        {"batching": {"suffix_prompts": 2}},
        {"http": {"host": _ANYWHERE, "allow_remote": True}},
        {"http": {"host": "::1"}},
        {"http": {"host": "localhost"}},
        {"http": {"host": "127.3.2.1"}},
    ],
)
def test_what_is_allowed_is_not_refused(make: Make, sections: dict[str, Any]) -> None:
    make(**sections)


def test_zero_in_batching_means_all_prompts_of_the_iteration(make: Make) -> None:
    config = make()
    assert (config.decode_prompts, config.prefix_prompts, config.suffix_prompts) == (8, 8, 8)


@pytest.mark.parametrize(
    ("parallel", "decode", "prefix"),
    [
        ({"devices": 4, "training": 4, "rollout": 2}, 4, 8),
        ({"devices": 4, "training": 1, "rollout": 2}, 4, 2),
        ({"devices": 4, "training": 2, "rollout": 1}, 2, 4),
        ({"devices": 4, "training": 1, "placement": "disaggregated", "rollout_devices": 1}, 8, 3),
    ],
)
def test_of_several_engines_and_replicas_each_has_an_equal_share_of_the_prompts(
    make: Make, parallel: dict[str, Any], decode: int, prefix: int
) -> None:
    config = make(parallel=parallel)
    assert (config.decode_prompts, config.prefix_prompts, config.suffix_prompts) == (decode, prefix, prefix)


def test_the_suffix_batch_follows_the_prefix_batch(make: Make) -> None:
    config = make(batching={"prefix_prompts": 4})
    assert (config.decode_prompts, config.prefix_prompts, config.suffix_prompts) == (8, 4, 4)


def test_without_a_divergence_term_there_is_no_reference(make: Make) -> None:
    assert make().needs_reference
    assert not make(algorithm={"beta": 0}).needs_reference


def test_an_evaluation_with_an_interval_also_comes_before_the_first_iteration_and_at_the_end(make: Make) -> None:
    often = make(eval=[_EVAL | {"every": 3}]).eval[0]
    assert [step for step in range(8) if often.due(step, last=step == 7)] == [0, 3, 6, 7]


def test_an_evaluation_without_an_interval_comes_at_the_end_only(make: Make) -> None:
    once = make(eval=[_EVAL]).eval[0]
    assert [step for step in range(8) if once.due(step, last=step == 7)] == [7]


def test_checkpoints_come_at_intervals_and_at_the_end_but_not_before_the_first_iteration(make: Make) -> None:
    section = make(checkpoint={"every": 3}).checkpoint
    assert [step for step in range(8) if section.due(step, last=step == 7)] == [3, 6, 7]
    section = make(checkpoint={"every": 0}).checkpoint
    assert [step for step in range(8) if section.due(step, last=step == 7)] == [7]


def test_schedules_in_turn_take_the_place_of_the_one(make: Make) -> None:
    one, several = make(run={"schedule": "stream"}).run, make(run={"alternate": ["serial", "overlap"]}).run
    assert [one.schedule_of(step) for step in range(3)] == ["stream"] * 3
    assert [several.schedule_of(step) for step in range(3)] == ["serial", "overlap", "serial"]
    assert (one.streams, several.streams) == (True, False)
    assert make(run={"alternate": ["serial", "stream"]}).run.streams
