"""The configuration of a workload. Knows no pictures."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from rollplex.bench.lengths import Lengths
from rollplex.bench.placement import Placement
from rollplex.errors import ConfigError
from rollplex.presets import SPECIAL_TOKENS
from rollplex.presets.tokenizer import END_OF_TURN

Device: TypeAlias = Literal["host", "cuda"]


def parse_device(text: str) -> Device:
    """Raises ConfigError for anything else."""
    if text not in ("host", "cuda"):
        raise ConfigError("There is no such device", got=repr(text), needed="host or cuda", where="--device")
    return "cuda" if text == "cuda" else "host"


def make_config(
    *, lengths: Lengths, group_size: int, prompts: int, device: Device = "host", placement: Placement | None = None
) -> dict[str, object]:
    """The workload's configuration; paths are relative to its folder. placement: None: of one device.

    Prefixes and suffixes are computed a prompt at a time, so that the schedules have something to arrange.
    """
    values: dict[str, Any] = {
        "run": {"name": "bench", "seed": 0, "iterations": 100},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"path": "rows.jsonl", "prompts_per_iteration": prompts},
        "rollout": {
            "group_size": group_size,
            "max_new_tokens": lengths.longest,
            "never_sample": [token for token in SPECIAL_TOKENS if token != END_OF_TURN],
            "forced_lengths": list(lengths.of(group_size * prompts)),
        },
        "rewards": {"functions": [{"function": "rollplex.bench.rewards:spread"}]},
        "algorithm": {"loss": "grpo", "beta": 0.04},
        "optimizer": {"name": "adamw", "lr": 1.0e-5},
        "batching": {"prefix_prompts": 1, "suffix_prompts": 1},
        "checkpoint": {"every": 0},
    }
    if device == "cuda":
        _for_gpu(values)
    if placement is not None:
        values["parallel"] = placement.keys
    return values


def _for_gpu(values: dict[str, Any]) -> None:
    """SGLang. Of a prefix only K and V are kept, since those of many long prompts are there at once, and its
    backward goes layer by layer, since eight copies of a long prompt would not fit otherwise; pages of pictures and
    responses are left out, which take the input child and the disk time that is not measured."""
    values["device"] = {"kind": "cuda"}
    values["model"]["dtype"] = "bfloat16"
    values["rollout"]["engine"] = "sglang"
    values["memory"] = {"prefix_activations": "recompute_layers"}
    values["run"] |= {"deterministic": False, "log_completions": 0, "sample_every": 0, "tensorboard": False}
