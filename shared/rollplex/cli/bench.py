"""`rollplex bench schedules`: from arguments to the bench, and from its result to what is printed and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rollplex.bench.nodes import Job, StoppedError, run_row
from rollplex.bench.plot import check_plot, write_plot
from rollplex.bench.report import report
from rollplex.bench.rows import Row, choose_modes
from rollplex.bench.schedules import Plan, run_schedules
from rollplex.cli.output import say
from rollplex.cli.start import fresh, timestamp

EXIT_FAILED = 1


def bench_schedules(
    config: Path,
    *,
    overrides: Sequence[str],
    modes: str,
    prefixes: str,
    repeats: int,
    iterations: int,
    warmup: int,
    out: Path | None,
    runs_dir: Path,
    plot: Path | None,
    markdown: bool,
    command: str,
    run: Callable[[Job], Row] = run_row,
) -> int:
    """Run the bench and print its result; 0, 1 if schedules ended with different weights, or as a signal has it.

    Args:
        out: the bench's folder; None: a new one in `runs_dir`.
        command: as the result quotes it.
        run: measures one row.

    Raises:
        RollplexError: as `run_schedules` and `write_plot`.
    """
    if plot is not None:
        check_plot(plot)  # before minutes of measuring
    out = (out or fresh(runs_dir, f"bench-{timestamp()}")).absolute()
    plan = Plan(
        config=config,
        overrides=overrides,
        modes=choose_modes(modes, prefixes),
        repeats=repeats,
        iterations=iterations,
        warmup=warmup,
        out=out,
        command=command,
    )
    say(f"folder {out}")
    try:
        result = run_schedules(plan, say=say, run=run)
    except StoppedError as stopped:
        say(f"{stopped}; the rows before are kept, and the same command with --out {out} goes on")
        return stopped.exit_code
    say("")
    for line in report(result, in_markdown=markdown):
        say(line)
    say("")
    say(f"kept in {out / 'result.json'}")
    if plot is not None:
        write_plot(result, plot)
        say(f"drawn in {plot}")
    return 0 if result.exact else EXIT_FAILED
