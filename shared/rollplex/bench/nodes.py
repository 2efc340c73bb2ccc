"""One row of a bench as a real node: starts it, waits for its end, reads what it left. Knows no other rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rollplex.bench.machine import OtherPrograms
from rollplex.bench.measure import measure, read_metrics
from rollplex.bench.rows import Mode, Row
from rollplex.cli.child import run_child
from rollplex.cli.start import Prepared, coordinator_command, prepare
from rollplex.config.environment import child_environment
from rollplex.errors import ConfigError, RollplexError
from rollplex.stop_signals import EXIT_INTERRUPTED

EXIT_CONFIG = 2
FIXED = (
    "eval=[]",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "run.alternate=[]",
    "run.restarts=0",
    "rollout.sglang.own_weights=false",
)
"""A bench evaluates nothing, writes no checkpoint (it keeps digests), and measures no iteration that was begun twice.
What its modes differ in, only they set."""
MOST_TOLD = 4000


class StoppedError(RollplexError):
    """A signal ended a row; `exit_code` is what it ends a program with."""

    exit_code = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row to measure.

    Attributes:
        config: the user's YAML file.
        overrides: the user's, `a.b=v` each.
        iterations: of the node, of which the first `warmup` do not count.
        prompt_tokens: mean per prompt.
        run_dir: where the node leaves its files.
        log: where its coordinator's output goes.
    """

    mode: Mode
    repeat: int
    config: Path
    overrides: Sequence[str]
    iterations: int
    warmup: int
    prompt_tokens: float
    run_dir: Path
    log: Path


@dataclass(frozen=True, kw_only=True)
class Node:
    """One run to its end.

    Attributes:
        what: names it in errors.
        config: the user's YAML file.
        overrides: all of them, `a.b=v` each.
        iterations: so many.
        run_dir: where it leaves its files.
        log: where its coordinator's output goes.
    """

    what: str
    config: Path
    overrides: Sequence[str]
    iterations: int
    run_dir: Path
    log: Path


Command: TypeAlias = Callable[[Prepared, int], list[str]]


def start_command(prepared: Prepared, iterations: int) -> list[str]:
    """How a row's coordinator is started."""
    return coordinator_command(prepared, iterations=iterations, die_with_parent=True)


def run_row(job: Job, *, command: Command = start_command) -> Row:
    """Start a node, wait for its end, and measure what it left.

    Args:
        job: the row.
        command: how the coordinator is started.

    Raises:
        StoppedError: it was interrupted or told to end.
        ConfigError: its configuration cannot run.
        RollplexError: it failed; says how, and where its log is.
    """
    started, start_s = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
    with OtherPrograms() as others:
        run_dir = run_node(
            Node(
                what=f"{job.mode.name}, repeat {job.repeat + 1}",
                config=job.config,
                overrides=[*job.overrides, *FIXED, *job.mode.overrides],
                iterations=job.iterations,
                run_dir=job.run_dir,
                log=job.log,
            ),
            command=command,
        )
    return measure(
        run_dir,
        job.mode,
        repeat=job.repeat,
        warmup=job.warmup,
        prompt_tokens=job.prompt_tokens,
        started=started,
        wall_s=time.monotonic() - start_s,
        others_cpus=others.cpus,
    )


def run_together(jobs: Sequence[Job], *, command: Command = start_command) -> list[Row]:
    """Rows whose schedules take turns in one node, iteration by iteration: one start for all, and the same machine.

    Args:
        jobs: of the same kind of prefix and repeat, otherwise alike; as many iterations of each as one alone has.

    Raises:
        As `run_row`.
    """
    first = jobs[0]
    turns = ",".join(job.mode.schedule for job in jobs)
    overrides = [*first.overrides, *FIXED, *first.mode.overrides, f"run.alternate=[{turns}]"]
    started, start_s = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
    with OtherPrograms() as others:
        run_dir = run_node(
            Node(
                what=f"{turns} {first.mode.prefix}, repeat {first.repeat + 1}",
                config=first.config,
                overrides=overrides,
                iterations=first.iterations * len(jobs),
                run_dir=first.run_dir,
                log=first.log,
            ),
            command=command,
        )
    wall_s = time.monotonic() - start_s
    return [
        measure(
            run_dir,
            job.mode,
            repeat=job.repeat,
            warmup=job.warmup,
            prompt_tokens=job.prompt_tokens,
            started=started,
            wall_s=wall_s,
            others_cpus=others.cpus,
            turn=turn,
            turns=len(jobs),
        )
        for turn, job in enumerate(jobs)
    ]


def run_node(node: Node, *, command: Command = start_command) -> Path:
    """Start a node and wait for its end; returns its run directory. Raises as `run_row`."""
    prepared = prepare(node.config, list(node.overrides), node.run_dir, node.run_dir.parent)
    config = prepared.config
    node.log.parent.mkdir(parents=True, exist_ok=True)
    with node.log.open("wb") as log:
        code = run_child(
            command(prepared, node.iterations),
            grace_s=2.0 * config.deadlines.leave_s + 5.0,
            environment=child_environment(threads=config.run.threads),
            output=log.fileno(),
        )
    _check_end(node, code)
    return prepared.run_dir


def _check_end(node: Node, code: int) -> None:
    if code == EXIT_INTERRUPTED or (code == 0 and len(read_metrics(node.run_dir)) < node.iterations):
        stopped = StoppedError("The bench was stopped", where=node.what)
        stopped.exit_code = code
        raise stopped
    if code != 0:
        kind = ConfigError if code == EXIT_CONFIG else RollplexError
        raise kind(
            f"A row of the bench failed with exit code {code}: {node.what}",
            got=last_error(node.log),
            do="The rows before it are kept: the same command goes on with this one.",
            where=str(node.log),
        )


def last_error(log: Path) -> str:
    """What a coordinator's output ends with: from its last "error:" on, or else its last line."""
    text = "\n" + log.read_text(encoding="utf-8", errors="replace").rstrip()
    _, mark, told = text.rpartition("\nerror:")
    return (told if mark else text.rpartition("\n")[2]).strip()[:MOST_TOLD] or "no word"
