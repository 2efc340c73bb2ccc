"""Runs a bench of schedules: plans its rows, has each measured, keeps them, sums up.

Owns the order of rows, what is refused before the first one, and the result. How a row is measured is a parameter.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rollplex.bench.ceilings import hiding_ceilings, sharing_ceiling
from rollplex.bench.facts import Facts, read_facts
from rollplex.bench.folder import BenchFolder, Made, run_dir_of
from rollplex.bench.machine import read_machine, read_software
from rollplex.bench.nodes import FIXED, Job, run_row, run_together
from rollplex.bench.result import Result, write_result
from rollplex.bench.rows import Mode, Row, order
from rollplex.bench.scaling import at_prompts, thinned
from rollplex.bench.summary import gains, summarise, unlike
from rollplex.bench.window import windows
from rollplex.config import load
from rollplex.config.overrides import parse_override
from rollplex.errors import ConfigError
from rollplex.protocol.rundir import RunDir, check_path

VARIED = ("run.schedule", "run.alternate", "run.share_prefix", "rollout.sglang.own_weights")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A bench.

    Attributes:
        config: YAML file of the workload.
        overrides: `a.b=v` each.
        modes: in the order of the result.
        repeats: of each mode.
        iterations: of each row.
        warmup: so many first iterations of each row do not count.
        out: the bench's folder.
        command: how the bench was asked for; the result keeps it.
        limit: so many rows are measured at most, and the next call goes on; 0: all.
        together: modes of one kind of prefix take turns in one node, iteration by iteration.
        replicated_prompts: rows with replicated prefixes have so many prompts; 0: as many as the others.
    """

    config: Path
    overrides: Sequence[str]
    modes: Sequence[Mode]
    repeats: int
    iterations: int
    warmup: int
    out: Path
    command: str = ""
    limit: int = 0
    replicated_prompts: int = 0
    together: bool = False


def run_schedules(
    plan: Plan,
    *,
    say: Callable[[str], None],
    run: Callable[[Job], Row] = run_row,
    run_all: Callable[[Sequence[Job]], Sequence[Row]] = run_together,
) -> Result:
    """Measure the rows that are not there yet, and sum all up in result.json.

    Args:
        say: gets a line for each row.
        run: measures one row.
        run_all: measures several that take turns.

    Raises:
        ConfigError: a plan or configuration that cannot run, or a folder with rows of another bench; nothing has run.
        StoppedError: a signal ended it; the rows before are kept.
        RollplexError: a row failed; the rows before are kept.
    """
    _check(plan)
    made, facts = _prepare(plan)
    with BenchFolder(plan.out, made) as folder:
        todo = [
            (repeat, mode)
            for repeat in range(plan.repeats)
            for mode in order(plan.modes, repeat)
            if folder.row(mode, repeat) is None
        ]
        total = plan.repeats * len(plan.modes)
        if len(todo) < total:
            say(f"{total - len(todo)} of {total} rows are there already")
        left, todo = len(todo), todo[: plan.limit or None]
        durations: list[float] = []
        for jobs in _batches(plan, [_job(plan, folder, facts, mode, repeat) for repeat, mode in todo]):
            start_s = time.monotonic()
            for row in run_all(jobs) if len(jobs) > 1 else [run(jobs[0])]:
                folder.append(row)
                durations.append((time.monotonic() - start_s) / len(jobs))
                number = len(durations)
                say(_told(row, total - left + number, total, fmean(durations) * (len(todo) - number)))
        if left > len(todo):
            say(f"{left - len(todo)} of {total} rows are left; the same command goes on")
        result = summed_up(plan, made, facts, folder.rows)
        write_result(result, plan.out / "result.json")
    return result


def summed_up(plan: Plan, made: Made, facts: Facts, rows: Sequence[Row]) -> Result:
    """The result of the rows that the plan names."""
    measured = [row for row in rows if row.mode in plan.modes and row.repeat < plan.repeats]
    wanted = [at_prompts(row, facts.prompts) for row in measured]
    modes = summarise(wanted, plan.modes)
    return Result(
        date=max(row.started for row in wanted),
        command=plan.command,
        made=made,
        facts=facts,
        repeats=plan.repeats,
        modes=modes,
        gains=gains(wanted),
        sharing=sharing_ceiling(modes, facts),
        hiding=hiding_ceilings(modes),
        unlike=tuple(unlike(modes)),
        others_cpus=fmean(row.others_cpus for row in wanted),
        windows=windows(modes),
        missing=plan.repeats * len(plan.modes) - len(wanted),
    )


def _check(plan: Plan) -> None:
    """What can be refused without reading anything."""
    if plan.warmup >= plan.iterations:
        raise ConfigError(
            "The warm-up leaves no iteration to measure",
            got=f"{plan.warmup} of {plan.iterations} iterations",
            needed="fewer than --iterations",
            where="--warmup",
        )
    for text in plan.overrides:
        path = ".".join(parse_override(text).path)
        if path in VARIED:
            raise ConfigError(
                "The bench sets this key itself",
                got=text,
                do="Choose with --rows, or --modes and --prefixes.",
                where="--set",
            )
    for mode in plan.modes:
        try:
            check_path(RunDir(run_dir_of(plan.out, mode, plan.repeats - 1)))
        except ConfigError as error:
            raise ConfigError(
                error.what, got=error.got, needed=error.needed, do="Choose another --out.", where=error.where
            ) from None


def _prepare(plan: Plan) -> tuple[Made, Facts]:
    """Check the configuration of every mode and read the data, before the first node."""
    configs = [load(plan.config, [*_overrides(plan, mode), *FIXED, *mode.overrides]) for mode in plan.modes]
    base = load(plan.config, [*plan.overrides, *FIXED, *Mode(schedule="serial", prefix="shared").overrides])
    assert configs, "a bench has modes"
    facts, data, model = read_facts(base, first=plan.warmup, end=plan.iterations)
    made = Made(
        machine=read_machine(base.device.gpu if base.device.kind == "cuda" else None, base.parallel.devices),
        software=read_software(),
        config=base.model_dump(mode="json"),
        data=data,
        model=model,
        iterations=plan.iterations,
        warmup=plan.warmup,
    )
    return made, facts


def _batches(plan: Plan, jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that share a node, in order; each alone unless modes take turns."""
    batches: dict[object, list[Job]] = {}
    for number, job in enumerate(jobs):
        apart = not (plan.together and job.mode.together)
        batches.setdefault(number if apart else (job.repeat, job.mode.together), []).append(job)
    return list(batches.values())


def _overrides(plan: Plan, mode: Mode) -> Sequence[str]:
    """The user's, and fewer prompts with about the same lengths if this row is to have fewer."""
    if mode.prefix != "replicated" or not plan.replicated_prompts:
        return plan.overrides
    rollout = load(plan.config, list(plan.overrides)).rollout
    fewer = [*plan.overrides, f"data.prompts_per_iteration={plan.replicated_prompts}"]
    if rollout.forced_lengths:
        kept = thinned(rollout.forced_lengths, plan.replicated_prompts * rollout.group_size)
        fewer.append(f"rollout.forced_lengths={json.dumps(kept)}")
    return fewer


def _job(plan: Plan, folder: BenchFolder, facts: Facts, mode: Mode, repeat: int) -> Job:
    return Job(
        mode=mode,
        repeat=repeat,
        config=plan.config,
        overrides=_overrides(plan, mode),
        iterations=plan.iterations,
        warmup=plan.warmup,
        prompt_tokens=facts.prompt_tokens,
        run_dir=folder.run_dir(mode, repeat),
        log=folder.log(mode, repeat),
    )


def _told(row: Row, number: int, total: int, left_s: float) -> str:
    left = f", about {left_s / 60:.0f} min left" if left_s >= 60 else ""
    return (
        f"row {number}/{total}  {row.mode.name:<18}  {row.median_s['iteration']:.2f} s/iteration  "
        f"{row.hidden_share:.0%} of prefix time hidden  ({row.wall_s:.0f} s{left})"
    )
