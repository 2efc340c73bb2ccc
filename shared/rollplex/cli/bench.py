"""`rollplex bench`: from arguments to the bench, and from its result to what is printed and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollplex.bench import gap, hbm, parallel, parallel_report
from rollplex.bench.gap import read_gaps, read_rounding, tables
from rollplex.bench.gradients import Comparison, compare_gradients, table_of
from rollplex.bench.lengths import parse_lengths
from rollplex.bench.nodes import Job, Node, StoppedError, run_node, run_row
from rollplex.bench.placement import parse_placements
from rollplex.bench.plot import check_plot, write_plot
from rollplex.bench.recipe import parse_device
from rollplex.bench.report import report
from rollplex.bench.rows import Row, choose_modes, choose_rows
from rollplex.bench.schedules import Plan, run_schedules
from rollplex.bench.tables import plain
from rollplex.bench.workload import Wanted, write_workload
from rollplex.cli.bench_output import EXIT_FAILED, folder_of, show
from rollplex.cli.output import say

VISION_TOKENS = 576
"""Of a workload that is not told otherwise."""


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
    rows: str = "",
    limit: int = 0,
    replicated_prompts: int = 0,
    together: bool = False,
    run: Callable[[Job], Row] = run_row,
) -> int:
    """Run the bench and print its result; 0, 1 if schedules ended with different weights, or as a signal has it.

    Args:
        out: the bench's folder; None: a new one in `runs_dir`.
        command: as the result quotes it.
        rows: the rows by name, in place of `modes` and `prefixes`; empty: those.
        limit, replicated_prompts, together: as `Plan` has them.
        run: measures one row.

    Raises:
        RollplexError: as `run_schedules` and `write_plot`.
    """
    if plot is not None:
        check_plot(plot)  # before minutes of measuring
    out = folder_of(out, runs_dir, "bench")
    plan = Plan(
        config=config,
        overrides=overrides,
        modes=choose_rows(rows) if rows else choose_modes(modes, prefixes),
        repeats=repeats,
        iterations=iterations,
        warmup=warmup,
        out=out,
        command=command,
        limit=limit,
        replicated_prompts=replicated_prompts,
        together=together,
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


def bench_gradients(
    config: Path,
    *,
    overrides: Sequence[str],
    responses: Path | None,
    spread_s: float,
    limit: int,
    out: Path | None,
    runs_dir: Path,
    command: str,
    run: Callable[[Node], Path] = run_node,
) -> int:
    """Compare gradients and print the table; 0, 1 if one is further from serial's than it may be, or as a signal has
    it.

    Raises:
        RollplexError: as `compare_gradients`.
    """
    out = folder_of(out, runs_dir, "gradients")
    wanted = Comparison(
        config=config,
        overrides=overrides,
        responses=responses,
        spread_s=spread_s,
        out=out,
        limit=limit,
        command=command,
    )
    say(f"folder {out}")
    try:
        compared = compare_gradients(wanted, say=say, run=run)
    except StoppedError as stopped:
        say(f"{stopped}; the same command with --out {out} goes on")
        return stopped.exit_code
    for line in plain(table_of(compared)):
        say(line)
    return EXIT_FAILED if compared.exceeded else 0


def bench_parallel(
    config: Path,
    *,
    overrides: Sequence[str],
    layouts: str,
    iterations: int,
    limit: int,
    out: Path | None,
    runs_dir: Path,
    markdown: bool,
    command: str,
    weights: bool = False,
    run: parallel.RunNode | None = None,
) -> int:
    """Compare several devices with one and print the table; 0, 1 if a gradient is further from the one device's than it
    may be, or as a signal has it.

    Raises:
        RollplexError: as `compare_layouts`.
    """
    out = folder_of(out, runs_dir, "parallel")
    wanted = parallel.Wanted(
        config=config,
        overrides=overrides,
        layouts=parse_placements(layouts),
        iterations=iterations,
        out=out,
        limit=limit,
        weights=weights,
        command=command,
    )
    say(f"folder {out}")
    try:
        compared = parallel.compare_layouts(wanted, say=say, run=run or parallel.run)
    except StoppedError as stopped:
        say(f"{stopped}; the same command with --out {out} goes on")
        return stopped.exit_code
    show(parallel_report.table_of(compared), parallel_report.notes(compared), markdown=markdown)
    return EXIT_FAILED if compared.exceeded else 0


def bench_gap(run_dir: Path, exact: Path | None = None) -> int:
    """Print the gaps of a run; 0, or 1 if a row's mean is too large. Raises DataError as `read_gaps` and
    `read_rounding`."""
    gaps = read_gaps(run_dir)
    rounding = None if exact is None else read_rounding(run_dir, exact)
    for found in tables(gaps):
        for line in plain(found):
            say(line)
        say("")
    say(
        f"greatest mean of a row: {gaps.worst:.5f} (limit {gap.LIMIT}); the mean changes by {gaps.slope:+.2e} an "
        f"iteration over {len(gaps.steps)}"
    )
    if rounding is not None:
        say(
            f"against float32, over {rounding.tokens} tokens: the rollout is {rounding.rollout:.5f} away, the trainer "
            f"{rounding.trainer:.5f}, one from the other {rounding.gap:.5f}; a trainer that rounds nothing would be "
            f"{rounding.rollout:.5f} from this rollout"
        )
    return 0 if gaps.within else EXIT_FAILED


def bench_hbm(run_dir: Path, *, warmup: int) -> int:
    """Print what a GPU held against the books; 0, or 1 if they are too far apart or a peak has grown.

    Raises:
        RollplexError: as `read_hbm`.
    """
    found = hbm.read_hbm(run_dir, warmup=warmup)
    for one in found:
        if len(found) > 1:
            say(f"device {one.device}")
        for line in plain(hbm.table(one)):
            say(line)
        if one.standing_bytes:
            held = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in one.standing_bytes.items())
            say(f"segments from LOAD on, GiB: {held}")
        limit = hbm.LIMIT * one.total_bytes / 2**30
        told = (
            "every phase is explained, and none has grown" if one.within else "a phase is not explained, or has grown"
        )
        overhead = one.overhead_bytes / 2**30
        say(f"{one.gpu}: overhead {overhead:.2f} GiB; {hbm.LIMIT:.0%} of the device are {limit:.2f} GiB: {told}")
    return 0 if all(one.within for one in found) else EXIT_FAILED


def bench_workload(folder: Path, *, response: str, device: str, placement: str = "", **given: Any) -> None:
    """Write a workload and say what it is.

    Args:
        response: as `parse_lengths` takes it.
        device: host or cuda.
        placement: as `parse_placements` takes one; empty: of one device.
        given: what else `Wanted` has.

    Raises:
        ConfigError: an unknown device, and as `write_workload`, whose other errors come out too.
    """
    places = parse_placements(placement) if placement else (None,)
    wanted = Wanted(device=parse_device(device), lengths=parse_lengths(response), placement=places[0], **given)
    if not wanted.vision_tokens and not wanted.prompt_tokens:
        wanted = msgspec.structs.replace(wanted, vision_tokens=VISION_TOKENS)
    written = write_workload(folder, wanted)
    say(
        f"{written.prompts} prompts x {written.group_size} responses an iteration; P = {written.prompt_tokens} prompt "
        f"tokens, {written.vision_tokens:.5g} of them vision; R = {written.lengths.text}; sharing's ceiling in "
        f"token-forwards, for scoring and training: {written.token_ceiling:.2f}x"
    )
    say(str(written.config))
