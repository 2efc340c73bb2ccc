"""The coordinator's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct


class Options(Struct, frozen=True, kw_only=True):
    """How this coordinator was started.

    iterations: how many to run before the end; None takes the configuration's. serve: stay idle afterwards, for HTTP.
    external_workers: rollout, prefix and trainer are started by somebody else (compose). die_with_parent: end when the
    process that started this one does.
    """

    config: Path
    run_dir: Path
    iterations: int | None
    serve: bool
    external_workers: bool
    die_with_parent: bool
    overrides: tuple[str, ...] = ()


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; `--help` describes it."""
    parser = argparse.ArgumentParser(prog="rollplex_coordinator", description="The coordinator of a Rollplex node.")
    parser.add_argument("--config", type=Path, required=True, help="YAML configuration")
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory; made with mode 0700")
    parser.add_argument("--iterations", type=int, help="iterations to run (default: the configuration's)")
    parser.add_argument("--serve", action="store_true", help="wait for HTTP instead of ending when there is no work")
    parser.add_argument("--external-workers", action="store_true", help="rollout, prefix, trainer start by themselves")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the starting process ends")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=V", help="override a key")
    args = parser.parse_args(argv)
    if args.iterations is not None and args.iterations < 0:
        parser.error(f"--iterations must be at least 0; got {args.iterations}")
    return Options(
        config=args.config,
        run_dir=args.run_dir,
        iterations=args.iterations,
        serve=args.serve,
        external_workers=args.external_workers,
        die_with_parent=args.die_with_parent,
        overrides=tuple(args.overrides),
    )
