"""`rollplex tune share`: from arguments to the measurements, and from their result to a table, the configuration and
the exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rollplex.bench.nodes import Job, StoppedError, run_row
from rollplex.bench.rows import Row
from rollplex.bench.tables import Table, plain
from rollplex.cli.output import say
from rollplex.cli.start import fresh, timestamp
from rollplex.config import load
from rollplex.config.editing import set_numbers
from rollplex.tune.candidates import grid, parse_candidates
from rollplex.tune.share import Sharing, Tuned, Wanted, encode, tune_share
from rollplex.whole_file import write_whole


def run_tune_share(
    config: Path,
    *,
    overrides: Sequence[str],
    candidates: str,
    repeats: int,
    iterations: int,
    warmup: int,
    out: Path | None,
    runs_dir: Path,
    only: int,
    dry_run: bool,
    command: str,
    run: Callable[[Job], Row] = run_row,
    sharing: Callable[[Path], Sharing] | None = None,
) -> int:
    """Measure, print, and write the shares into `config`; 0, or as a signal has it.

    Args:
        candidates: as `parse_candidates` takes them; "": the usual ones.
        out: where rows are kept; None: a new folder in `runs_dir`.
        only: at most so many rows now, the same command goes on; 0: all.
        dry_run: `config` stays as it is.
        command, run, sharing: as `tune_share`.

    Raises:
        RollplexError: as `tune_share` and `set_numbers`.
    """
    out = (out or fresh(runs_dir, f"tune-{timestamp()}")).absolute()
    limits_decoding = load(config, overrides).rollout.engine == "sglang"
    wanted = Wanted(
        config=config,
        overrides=overrides,
        candidates=parse_candidates(candidates) if candidates else grid(limits_decoding=limits_decoding),
        repeats=repeats,
        iterations=iterations,
        warmup=warmup,
        out=out,
        command=command,
    )
    text = config.read_text(encoding="utf-8")
    set_numbers(text, "device", {"prefix_share": 0.5, "decode_share": 0.5}, where=str(config))  # before hours of rows
    say(f"folder {out}")
    try:
        tuned = tune_share(wanted, say=say, run=_at_most(only, run) if only else run, sharing=sharing)
    except StoppedError as stopped:
        say(f"{stopped}; the rows before are kept, and the same command with --out {out} goes on")
        return stopped.exit_code
    for line in report(tuned):
        say(line)
    if dry_run:
        say(f"kept in {out / 'share.json'}; {config} stays as it is")
        return 0
    taken = tuned.choice.taken
    shares = {"prefix_share": taken.prefix_share, "decode_share": taken.decode_share}
    text = config.read_text(encoding="utf-8")  # again: somebody may have worked on it meanwhile
    write_whole(config, set_numbers(text, "device", shares, where=str(config)).encode(), durable=True)
    beside = config.with_suffix(".share.json")
    write_whole(beside, encode(tuned), durable=True)
    say(f"written into {config}; all figures in {beside}")
    return 0


def _at_most(count: int, run: Callable[[Job], Row]) -> Callable[[Job], Row]:
    """Measures so many rows and then stops as a signal would, but with exit code 0."""
    left = iter(range(count))

    def limited(job: Job) -> Row:
        if next(left, None) is None:
            raise StoppedError("As many rows as asked for are measured")
        return run(job)

    return limited


def report(tuned: Tuned) -> list[str]:
    """What is printed."""
    alone, choice = tuned.alone, tuned.choice
    lines = ["", f"alone: rollout {alone.rollout_s:.2f} s, prefix work {alone.prefix_s:.2f} s", ""]
    rows = tuple(
        (
            one.candidate.text,
            f"{one.rollout_s:.2f} s",
            f"{one.hidden:.0%}",
            f"{one.cost_s(alone):.2f} s",
            f"{one.ratio(alone):.3f}",
            f"{one.iteration_s:.2f} s",
        )
        for one in tuned.measured
    )
    head = ("prefix:decode", "rollout", "hidden", "window", "ratio", "iteration")
    lines += [*plain(Table(head=head, rows=rows)), ""]
    if tuned.sharing == "turns":
        lines.append(f"warning: the workers take turns on this GPU, so that no share helps: {tuned.why}")
    elif not choice.gains:
        lines.append("warning: no share wins more than repeats differ by; device.sharing: turns does without MPS")
    taken = choice.taken
    lines.append(
        f"device.prefix_share: {taken.prefix_share:g}, device.decode_share: {taken.decode_share:g} "
        f"(window ratio {choice.ratio:.3f}; equal within {choice.noise:.1%})"
    )
    return lines
