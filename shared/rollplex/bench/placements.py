"""Colocated against disaggregated: the same work under several placements, each a bench of schedules in a folder of its
own (`schedules`), whose repeats take turns.

    OUT/2x1-1x2, OUT/1x1+1x1, ...    bench.json, rows.jsonl, runs, logs, result.json of one placement
    OUT/placements.json              all of them

Owns: their order, and what is said of them together. Does not know: how a row is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from rollplex.bench.nodes import Job, run_row, run_together
from rollplex.bench.placement import Placement
from rollplex.bench.report import head as head_of
from rollplex.bench.result import Result
from rollplex.bench.rows import Mode, Row
from rollplex.bench.schedules import Plan, run_schedules
from rollplex.bench.summary import ModeSummary, Spread
from rollplex.bench.tables import Table
from rollplex.errors import ConfigError
from rollplex.whole_file import write_whole

FILE: Final = "placements.json"
PAPER: Final = (1.57, 2.24)
"""What the paper gives for colocation over disaggregation, on its models and machines."""
SET_HERE: Final = "parallel."
IDLE: Final = "idle/"
"""Of a device, in a row's seconds."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A bench of placements.

    Attributes:
        config: YAML file of the workload.
        overrides: `a.b=v` each; no key of `parallel`.
        placements: in the order of the result.
        schedules: names, in the order of the result.
        repeats, iterations, warmup: as of a bench of schedules.
        out: the folder.
        limit: so many rows at most are measured now; 0: all.
        together: the schedules of a placement take turns in one node.
        command: how it was asked for.
    """

    config: Path
    overrides: Sequence[str]
    placements: Sequence[Placement]
    schedules: Sequence[str]
    repeats: int
    iterations: int
    warmup: int
    out: Path
    limit: int = 0
    together: bool = True
    command: str = ""


class Placed(Struct, frozen=True, kw_only=True):
    """The file placements.json."""

    command: str
    results: dict[str, Result]
    """By placement; those without a row yet are left out."""
    apart: tuple[str, ...]
    """Placements whose rollout has devices of its own."""
    missing: int
    """Rows that are not measured yet."""


def run_placements(
    wanted: Wanted,
    *,
    say: Callable[[str], None],
    run: Callable[[Job], Row] = run_row,
    run_all: Callable[[Sequence[Job]], Sequence[Row]] = run_together,
) -> Placed:
    """Measure the rows that are not there yet.

    Raises:
        As `run_schedules`.
    """
    if own := [text for text in wanted.overrides if text.startswith(SET_HERE)]:
        raise ConfigError("The bench sets this key itself", got=own[0], do="Choose with --placements.", where="--set")
    counted = _Counted(run, run_all)
    results: dict[str, Result] = {}
    for repeat in range(wanted.repeats):
        turn = list(wanted.placements)[:: -1 if repeat % 2 else 1]
        for placement in turn:
            left = wanted.limit - counted.rows
            if wanted.limit and left <= 0:
                continue
            say(f"{placement}, repeat {repeat + 1}")
            results[str(placement)] = run_schedules(
                _plan(wanted, placement, repeat + 1, left if wanted.limit else 0),
                say=say,
                run=counted.one,
                run_all=counted.several,
            )
    found = {str(each): results[str(each)] for each in wanted.placements if str(each) in results}
    rows = sum(mode.seconds["iteration"].count for result in found.values() for mode in result.modes)
    placed = Placed(
        command=wanted.command,
        results=found,
        apart=tuple(str(each) for each in wanted.placements if each.apart),
        missing=wanted.repeats * len(wanted.schedules) * len(wanted.placements) - rows,
    )
    write_whole(wanted.out / FILE, msgspec.json.format(msgspec.json.encode(placed), indent=2) + b"\n", durable=True)
    return placed


def table_of(placed: Placed) -> Table:
    """One line a placement and schedule."""
    devices = max((len(_idle(mode)) for _, mode in _modes(placed)), default=0)
    fastest = _fastest(placed)
    head = (
        *("placement", "schedule", "s/iteration", "repeats", "rollout", "score", "train", "update", "publish ms"),
        *(f"idle s of device {number}" for number in range(devices)),
        *(f"% of device {number}" for number in range(devices)),
        "over the same apart",
        "over the fastest apart",
    )
    same = {mode.schedule: mode for name, mode in _modes(placed) if name in placed.apart}
    rows = []
    for name, mode in _modes(placed):
        seconds, idle = mode.seconds, _idle(mode)
        whole = seconds["iteration"]
        rows.append(
            (
                *(name, mode.schedule, _s(whole.median), _range(whole)),
                *(_s(seconds[phase].median) for phase in ("rollout", "score", "train", "update")),
                f"{seconds['publish'].median * 1e3:.1f}" if "publish" in seconds else "-",
                *_padded([_s(one.median) for one in idle], devices),
                *_padded([f"{one.median / whole.median:.0%}" for one in idle], devices),
                _gain(same.get(mode.schedule), mode),
                _gain(fastest, mode),
            )
        )
    return Table(head=head, rows=tuple(rows))


def notes(placed: Placed) -> list[str]:
    """On what it was measured, and what is gained."""
    found = [next(iter(placed.results.values()))] if placed.results else []
    lines = [line for result in found for line in head_of(result)[:3]]
    if found:
        made, schedules = found[0].made, len(found[0].modes)
        lines.append(
            f"Repeats at most: {found[0].repeats}, of {schedules} schedules in each placement, placements in turn; "
            f"{made.iterations} iterations each, the first {made.warmup} not counted; medians."
        )
    lines.append(
        "A placement is training TP x replicas / rollout TP x engines on the same devices; with + the rollout has "
        "devices of its own, to which the weights are copied after each update."
    )
    lines.append("Idle: no unit, vote, optimizer step or copy of any process of the device ran.")
    lines += _gains(placed)
    if placed.missing:
        lines.append(f"WARNING: {placed.missing} rows are not measured yet.")
    return [*lines, f"Command: `{placed.command}`"]


def _gains(placed: Placed) -> list[str]:
    together = [(name, mode) for name, mode in _modes(placed) if name not in placed.apart]
    base = _fastest(placed)
    if base is None or not together:
        return []
    name, best = min(together, key=lambda one: one[1].seconds["iteration"].median)
    single = min(best.seconds["iteration"].count, base.seconds["iteration"].count) == 1
    gained = f"Fastest colocated ({name}, {best.schedule}) over fastest apart ({base.schedule}): {_gain(base, best)}."
    paper = f"The paper gives {PAPER[0]}x to {PAPER[1]}x, on its models and machines."
    once = " One repeat: how much it differs from run to run is not known." if single else ""
    return [f"{gained} {paper}{once}"]


class _Counted:
    """Measures rows, and counts them."""

    def __init__(self, run: Callable[[Job], Row], run_all: Callable[[Sequence[Job]], Sequence[Row]]) -> None:
        self._run, self._run_all = run, run_all
        self.rows = 0

    def one(self, job: Job) -> Row:
        row = self._run(job)
        self.rows += 1
        return row

    def several(self, jobs: Sequence[Job]) -> Sequence[Row]:
        rows = self._run_all(jobs)
        self.rows += len(rows)
        return rows


def _plan(wanted: Wanted, placement: Placement, repeats: int, limit: int) -> Plan:
    return Plan(
        config=wanted.config,
        overrides=[*wanted.overrides, *placement.overrides],
        modes=[Mode(schedule=schedule, prefix="shared") for schedule in wanted.schedules],
        repeats=repeats,
        iterations=wanted.iterations,
        warmup=wanted.warmup,
        out=wanted.out / placement.file_name,
        command=wanted.command,
        limit=limit,
        together=wanted.together,
    )


def _modes(placed: Placed) -> list[tuple[str, ModeSummary]]:
    return [(name, mode) for name, result in placed.results.items() for mode in result.modes]


def _fastest(placed: Placed) -> ModeSummary | None:
    apart = [mode for name, mode in _modes(placed) if name in placed.apart]
    return min(apart, key=lambda mode: mode.seconds["iteration"].median, default=None)


def _idle(mode: ModeSummary) -> list[Spread]:
    """By device, in order."""
    named: Mapping[str, Spread] = {name: one for name, one in mode.seconds.items() if name.startswith(IDLE)}
    return [named[name] for name in sorted(named, key=_number)]


def _number(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in name.removeprefix(IDLE).split(":"))


def _padded(texts: list[str], width: int) -> list[str]:
    return texts + ["-"] * (width - len(texts))


def _gain(base: ModeSummary | None, mode: ModeSummary) -> str:
    if base is None:
        return "-"
    return f"{base.seconds['iteration'].median / mode.seconds['iteration'].median:.2f}x"


def _range(spread: Spread) -> str:
    return f"{_s(spread.low)} to {_s(spread.high)}" if spread.count > 1 else "one"


def _s(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.995 else f"{seconds:.3f}"
