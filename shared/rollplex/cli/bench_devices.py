"""`rollplex bench refresh` and `placements`: from arguments to the bench, and to what is printed and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rollplex.bench import placements as placed
from rollplex.bench import refresh, refresh_report
from rollplex.bench.nodes import Job, StoppedError, run_row, run_together
from rollplex.bench.placement import parse_placements
from rollplex.bench.recipe import parse_device
from rollplex.bench.rows import Row, choose_modes
from rollplex.cli.bench_output import EXIT_FAILED, folder_of, show
from rollplex.cli.output import say


def bench_refresh(
    *,
    preset: str,
    placements: str,
    device: str,
    gpu: int,
    repeats: int,
    warmup: int,
    out: Path | None,
    runs_dir: Path,
    markdown: bool,
    command: str,
) -> int:
    """Measure and print the table; 0, or 1 if copies and collectives left different bytes.

    Raises:
        RollplexError: as `measure_refresh`.
    """
    out = folder_of(out, runs_dir, "refresh")
    wanted = refresh.Wanted(
        preset=preset,
        placements=parse_placements(placements),
        repeats=repeats,
        warmup=warmup,
        device=parse_device(device),
        out=out,
        gpu=gpu,
        command=command,
    )
    say(f"folder {out}")
    found = refresh.measure_refresh(wanted, say=say)
    say("")
    show(refresh_report.table_of(found), refresh_report.notes(found), markdown=markdown)
    say(f"kept in {out / 'refresh.json'}")
    return 0 if found.same else EXIT_FAILED


def bench_placements(
    config: Path,
    *,
    overrides: Sequence[str],
    placements: str,
    modes: str,
    repeats: int,
    iterations: int,
    warmup: int,
    limit: int,
    together: bool,
    out: Path | None,
    runs_dir: Path,
    markdown: bool,
    command: str,
    run: Callable[[Job], Row] = run_row,
    run_all: Callable[[Sequence[Job]], Sequence[Row]] = run_together,
) -> int:
    """Run the bench and print its table; 0, or as a signal has it.

    Args:
        out: the bench's folder; None: a new one in `runs_dir`.
        run, run_all: measure one row, and several that take turns.

    Raises:
        RollplexError: as `run_placements`.
    """
    out = folder_of(out, runs_dir, "placements")
    wanted = placed.Wanted(
        config=config,
        overrides=overrides,
        placements=parse_placements(placements),
        schedules=[mode.schedule for mode in choose_modes(modes, "shared")],
        repeats=repeats,
        iterations=iterations,
        warmup=warmup,
        out=out,
        limit=limit,
        together=together,
        command=command,
    )
    say(f"folder {out}")
    try:
        found = placed.run_placements(wanted, say=say, run=run, run_all=run_all)
    except StoppedError as stopped:
        say(f"{stopped}; the rows before are kept, and the same command with --out {out} goes on")
        return stopped.exit_code
    say("")
    show(placed.table_of(found), placed.notes(found), markdown=markdown)
    say(f"kept in {out / placed.FILE}")
    return 0
