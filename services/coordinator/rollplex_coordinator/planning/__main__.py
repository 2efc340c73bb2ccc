"""`python -m rollplex_coordinator.planning`: one plan, written as JSON; what `rollplex plan` runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollplex.config.base import parse_size
from rollplex.config.loading import load
from rollplex.errors import ConfigError, RollplexError
from rollplex.layout.published import QWEN2_5_VL
from rollplex.layout.shape import read_shape
from rollplex.whole_file import write_whole
from rollplex_coordinator.planning.answer import answer
from rollplex_coordinator.planning.question import Question

PREFIX = "qwen2.5-vl-"
EXIT_FAILED, EXIT_CONFIG = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, also of a plan in which nothing fits; 2: a question that cannot be asked."""
    args = _parser().parse_args(argv)
    try:
        write_whole(args.out, msgspec.json.encode(answer(question_of(args))))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_CONFIG
    except (RollplexError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return 0


def question_of(args: argparse.Namespace) -> Question:
    """The question of a command line.

    Raises:
        ConfigError: it cannot be asked.
        ModelError: a model folder that cannot be used.
    """
    overrides = list(args.overrides)
    if args.response_tokens is not None:
        overrides += [f"rollout.max_new_tokens={args.response_tokens}"]
    config = load(args.config, overrides, check_files=False)
    if args.shape:
        size = args.shape.lower().removeprefix(PREFIX).upper()
        if size not in QWEN2_5_VL:
            known = ", ".join(f"{PREFIX}{name.lower()}" for name in QWEN2_5_VL)
            raise ConfigError("This model's shape is not known", got=args.shape, needed=known, where="--shape")
        shape, model = QWEN2_5_VL[size], f"Qwen2.5-VL-{size}"
    else:
        shape, model = read_shape(config.model.path), config.model.path.name
    rollout_gpus = args.gpus // 2 if args.rollout_gpus is None else args.rollout_gpus
    return Question(
        config=config,
        shape=shape,
        model=model,
        gpus=args.gpus,
        training=args.train_tp,
        rollout=args.rollout_tp,
        rollout_gpus=rollout_gpus,
        hbm_bytes=args.hbm,
        prompt_tokens=args.prompt_tokens,
        image_tokens=args.image_tokens,
        micro_batch=args.micro_batch,
        baseline_gradients=args.baseline_gradients,
        optimizer_on_host="host" in (args.optimizer, config.memory.optimizer),
    ).checked()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollplex plan", description="What a configuration holds on each device.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--shape", default="")
    parser.add_argument("--gpus", type=_positive, default=1)
    parser.add_argument("--train-tp", type=_positive, default=1)
    parser.add_argument("--rollout-tp", type=_positive, default=1)
    parser.add_argument("--rollout-gpus", type=int)
    parser.add_argument("--hbm", type=_size, default=80 * 2**30)
    parser.add_argument("--prompt-tokens", type=_positive, required=True)
    parser.add_argument("--image-tokens", type=int, default=0)
    parser.add_argument("--response-tokens", type=_positive)
    parser.add_argument("--micro-batch", type=_positive, default=1)
    parser.add_argument("--baseline-gradients", default="")
    parser.add_argument("--optimizer", choices=("device", "host"), default="device")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _size(text: str) -> int:
    try:
        size = parse_size(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {error}") from None
    if not isinstance(size, int) or size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size")
    return size


if __name__ == "__main__":
    sys.exit(main())
