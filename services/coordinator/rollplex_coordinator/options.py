"""The coordinator's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from rollplex.journal.phases import MOST_ITERATIONS

NEWEST = ""
"""--resume without a checkpoint."""


class VerifyOptions(Struct, frozen=True, kw_only=True):
    """One group is computed in several ways instead of training (`rollplex_coordinator.verify`).

    report: the JSON file to write. row: of the training data; None takes the first good one. Tolerances: None takes
    those of the dtype.
    """

    report: Path
    row: int | None = None
    logprob_tolerance: float | None = None
    gradient_tolerance: float | None = None


class ResumeOptions(Struct, frozen=True, kw_only=True):
    """The run in the run directory goes on (`rollplex_coordinator.resuming`).

    checkpoint: from this one; None takes the newest good one. accepted: keys and fingerprints that may differ. if_any:
    where there is no checkpoint at all, the run begins from its beginning.
    """

    checkpoint: Path | None = None
    if_any: bool = False
    accepted: tuple[str, ...] = ()


class Options(Struct, frozen=True, kw_only=True):
    """How this coordinator was started.

    iterations: how many the run is to have at its end, those before a resumption too; None takes the configuration's.
    serve: stay idle afterwards, for HTTP.
    external_workers: rollout, prefix and trainer are started by somebody else (compose). die_with_parent: end when the
    process that started this one does. dry_run: check what can be checked without the model, say what would run, end.
    """

    config: Path
    run_dir: Path
    iterations: int | None
    serve: bool
    external_workers: bool
    die_with_parent: bool
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    verify: VerifyOptions | None = None
    resume: ResumeOptions | None = None


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; `--help` describes it."""
    parser = argparse.ArgumentParser(prog="rollplex_coordinator", description="The coordinator of a Rollplex node.")
    parser.add_argument("--config", type=Path, required=True, help="YAML configuration")
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory; made with mode 0700")
    parser.add_argument("--iterations", type=int, help="iterations to run (default: the configuration's)")
    parser.add_argument("--serve", action="store_true", help="wait for HTTP instead of ending when there is no work")
    parser.add_argument("--external-workers", action="store_true", help="rollout, prefix, trainer start by themselves")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the starting process ends")
    parser.add_argument("--dry-run", action="store_true", help="check configuration, data, rewards, memory; then end")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=V", help="override a key")
    resume = parser.add_argument_group("resumption", "the run in the run directory goes on")
    resume.add_argument(
        "--resume", nargs="?", const=NEWEST, metavar="CHECKPOINT", help="from this one (default: the newest good one)"
    )
    resume.add_argument(
        "--if-checkpoint", choices=["begin", "resume"], default="begin", help="if there is one, and no --resume"
    )
    resume.add_argument("--accept", action="append", default=[], metavar="KEY", help="that may differ from before")
    verify = parser.add_argument_group("verification", "instead of iterations")
    verify.add_argument("--verify", type=Path, metavar="REPORT", help="compute one group in several ways, write this")
    verify.add_argument("--verify-row", type=int, metavar="N", help="row of the training data (default: the first)")
    verify.add_argument("--verify-logprob-tolerance", type=float, metavar="X", help="default: that of the dtype")
    verify.add_argument("--verify-gradient-tolerance", type=float, metavar="X", help="default: that of the dtype")
    args = parser.parse_args(argv)
    if args.iterations is not None and not 0 <= args.iterations <= MOST_ITERATIONS:
        parser.error(f"--iterations must be 0 to {MOST_ITERATIONS}; got {args.iterations}")
    if args.verify is not None and (args.serve or args.iterations is not None):
        parser.error("--verify runs no iterations: it goes with neither --iterations nor --serve")
    goes_on = args.resume is not None or args.if_checkpoint == "resume"
    if args.accept and not goes_on:
        parser.error("--accept is about a resumption: it needs --resume")
    if goes_on and (args.verify is not None or args.dry_run):
        parser.error("--resume goes with neither --verify nor --dry-run")
    return Options(
        config=args.config,
        run_dir=args.run_dir,
        iterations=args.iterations,
        serve=args.serve,
        external_workers=args.external_workers,
        die_with_parent=args.die_with_parent,
        overrides=tuple(args.overrides),
        dry_run=args.dry_run,
        verify=_verify_options(args),
        resume=_resume_options(args),
    )


def _resume_options(args: argparse.Namespace) -> ResumeOptions | None:
    accepted = tuple(args.accept)
    if args.resume is None:
        return ResumeOptions(accepted=accepted, if_any=True) if args.if_checkpoint == "resume" else None
    checkpoint = None if args.resume == NEWEST else Path(args.resume)
    return ResumeOptions(checkpoint=checkpoint, accepted=accepted)


def _verify_options(args: argparse.Namespace) -> VerifyOptions | None:
    if args.verify is None:
        return None
    return VerifyOptions(
        report=args.verify,
        row=args.verify_row,
        logprob_tolerance=args.verify_logprob_tolerance,
        gradient_tolerance=args.verify_gradient_tolerance,
    )
