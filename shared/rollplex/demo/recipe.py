"""The digits demo's folder: data, model and the configuration that was seen to learn. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollplex.config.yaml_text import dumps
from rollplex.demo.digits import HELD_OUT, HELD_OUT_GREY, TRAIN, Written, write_digits
from rollplex.presets import SPECIAL_TOKENS, TINY, write_preset
from rollplex.presets.tokenizer import END_OF_TURN

QUICK_DIGITS: Final = (0, 1, 4, 7)
ALL_DIGITS: Final = tuple(range(10))
RIGHT: Final = "right"
"""The reward function that is 1 for the right digit and 0 for anything else."""
ACCURACY: Final = f"rewards/{RIGHT}/mean"
"""The key of eval.jsonl that holds the accuracy."""
EVAL_HELD_OUT: Final = "held_out"
EVAL_GREY: Final = "held_out_grey"


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a demo that ran to its end must have reached; accuracies, 0 to 1."""

    held_out: float
    """At least so much on scans that were not learned from."""
    grey: float
    """Less than this where there is nothing to see: more would mean that the answers leak."""


QUICK_PROMISE: Final = Promise(held_out=0.85, grey=0.4)
FULL_PROMISE: Final = Promise(held_out=0.90, grey=0.2)


@dataclass(frozen=True, kw_only=True)
class DemoFolder:
    """What `write_demo` wrote."""

    config: Path
    digits: tuple[int, ...]
    rows: Written
    promise: Promise

    @property
    def chance(self) -> float:
        """Accuracy of naming one of the digits blindly."""
        return 1.0 / len(self.digits)


def write_demo(folder: Path, *, quick: bool) -> DemoFolder:
    """Write data/, model/ and config.yaml. What is there is replaced, with the same bytes.

    Raises:
        DataError: scikit-learn is not installed.
        OSError: the folder cannot be written.
    """
    digits = QUICK_DIGITS if quick else ALL_DIGITS
    rows = write_digits(folder / "data", digits=digits)
    write_preset(TINY.name, folder / "model")
    config = folder / "config.yaml"
    config.write_text(dumps(make_config(quick=quick)), encoding="utf-8")
    promise = QUICK_PROMISE if quick else FULL_PROMISE
    return DemoFolder(config=config, digits=digits, rows=rows, promise=promise)


def make_config(*, quick: bool) -> dict[str, object]:
    """The demo's configuration; paths are relative to the demo's folder.

    Quick: four digits, 400 iterations. Full: ten digits, 1800 iterations. The reward for a wrong digit's name, the
    entropy bonus, and advantages without scaling belong together; so do the linear decay and a steady accuracy.
    """
    iterations = 400 if quick else 1800
    return {
        "run": {"name": "digits-quick" if quick else "digits", "seed": 0, "iterations": iterations},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"path": f"data/{TRAIN}", "prompts_per_iteration": 16},
        "rollout": {
            "group_size": 8,
            "max_new_tokens": 2,
            "never_sample": [token for token in SPECIAL_TOKENS if token != END_OF_TURN],
        },
        "rewards": {
            "functions": [
                {"function": "rollplex.demo.rewards:digit_reward", "weight": 1.0},
                {"function": "rollplex.demo.rewards:right", "weight": 0.0},
            ]
        },
        "algorithm": {"loss": "dapo", "scale_rewards": "none", "kl": "k3", "beta": 0.001, "entropy_bonus": 0.05},
        "optimizer": {
            "name": "adamw",
            "lr": 1.5e-3,
            "betas": [0.9, 0.95],
            "max_grad_norm": 1.0,
            "schedule": "linear",
            "warmup_steps": 5,
            "final_lr_ratio": 0.05,
        },
        "checkpoint": {"every": iterations // 4, "keep": 2},
        "eval": [
            {"name": EVAL_HELD_OUT, "data": f"data/{HELD_OUT}", "every": iterations // 4},
            {"name": EVAL_GREY, "data": f"data/{HELD_OUT_GREY}"},
        ],
    }
