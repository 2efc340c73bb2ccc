"""From the directory of a run that has ended to its row. Reads metrics.jsonl and the journal; starts nothing."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from rollplex.bench.rows import PHASES, Mode, Row
from rollplex.errors import DataError
from rollplex.journal.events import GroupFinished, MemoryObserved, UnitDone, UnitKind, UpdateCommitted
from rollplex.journal.reader import Reader

FORWARDS = (UnitKind.REFERENCE_PREFIX, UnitKind.ACTOR_PREFIX)
METRICS_FILE, JOURNAL_FILE = "metrics.jsonl", "journal.sqlite"
PROMPT_LENGTH = "prompts/mean_length"
_IDLE = re.compile(r"^time/(idle/\d+:\d+)_s$", re.MULTILINE)
"""Of a device, node:number."""
Metrics: TypeAlias = Mapping[str, object]


def measure(
    run_dir: Path,
    mode: Mode,
    *,
    repeat: int,
    warmup: int,
    prompt_tokens: float,
    started: str,
    wall_s: float,
    others_cpus: float,
    turn: int = 0,
    turns: int = 1,
) -> Row:
    """The row of a run.

    Args:
        warmup: so many first iterations do not count.
        prompt_tokens: mean per prompt, used if the metrics do not say it.
        started, wall_s, others_cpus: see `Row`.
        turn, turns: of every `turns` iterations the one that counts, from 0.

    Raises:
        DataError: no iteration that counts, one without an update, or records that cannot be read.
        JournalError: the journal cannot be read.
    """
    rows = read_metrics(run_dir)[turn::turns][warmup:]
    for row in rows:
        if row.get("updated") != 1.0:
            raise DataError(
                "An iteration made no update, so its time means nothing",
                got=f"step {row.get('step')}",
                do="Give the bench rewards that differ within a group.",
                where=str(run_dir / METRICS_FILE),
            )
    if not rows:
        raise DataError("No iteration is left after the warm-up", where=str(run_dir / METRICS_FILE))
    steps = [int(_number(row, "step")) for row in rows]
    with Reader(run_dir / JOURNAL_FILE) as reader:
        units = [cast("UnitDone", record.event) for record in reader.events_of_type(UnitDone)]
        groups = [cast("GroupFinished", record.event) for record in reader.events_of_type(GroupFinished)]
        commits = [cast("UpdateCommitted", record.event) for record in reader.events_of_type(UpdateCommitted)]
        observed = [cast("MemoryObserved", record.event) for record in reader.events_of_type(MemoryObserved)]
    by_step: dict[int, list[UnitDone]] = defaultdict(list)
    for unit in units:
        by_step[unit.step].append(unit)
    parts = [{**_phases(row), **_units(by_step[step])} for row, step in zip(rows, steps, strict=True)]
    lengths = [length for group in groups if group.step in steps for length in group.lengths]
    prompts = [_number(row, PROMPT_LENGTH) for row in rows if PROMPT_LENGTH in row]
    mean_prompt = statistics.fmean(prompts) if prompts else prompt_tokens
    copies = len(groups[0].lengths) if mode.prefix == "replicated" else 1
    return Row(
        repeat=repeat,
        schedule=mode.schedule,
        prefix=mode.prefix,
        started=started,
        wall_s=wall_s,
        iteration_s=tuple(part["iteration"] for part in parts),
        median_s={name: statistics.median(part[name] for part in parts) for name in parts[0]},
        hidden_share=statistics.median(
            part["prefix_hidden"] / part["prefix_forward"] if part["prefix_forward"] else 0.0 for part in parts
        ),
        prompt_tokens=mean_prompt,
        response_tokens=statistics.fmean(lengths),
        digest=commits[-1].digest if turns == 1 else "",
        others_cpus=others_cpus,
        prompts=len({group.group for group in groups if group.step == steps[0]}),
        decode_tokens_s=sum(lengths) / (len(steps) * statistics.median(map(_decoding, parts))),
        prefix_tokens_s=statistics.median(_prefix_rate(by_step[step], mean_prompt * copies) for step in steps),
        work_hidden=statistics.median(_work_hidden(by_step[step]) for step in steps),
        peak_bytes=_peaks(one for one in observed if one.step in steps),
    )


def read_metrics(run_dir: Path) -> list[Metrics]:
    """The iterations that a run wrote down; none if it did not get so far. A last line cut short is left out.

    Raises:
        DataError: a line is not a JSON object.
    """
    file = run_dir / METRICS_FILE
    if not file.is_file():
        return []
    found: list[Metrics] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError("A line is not JSON", got=str(error), where=f"{file}:{number}") from None
        if not isinstance(row, dict):
            raise DataError("A line is not a JSON object", got=line.strip()[:80], where=f"{file}:{number}")
        found.append(cast("Metrics", row))
    return found


def _phases(row: Metrics) -> dict[str, float]:
    """Seconds of one iteration, and of the phases that it is made of."""
    whole = _number(row, "time/step_s")
    phases = {name: _number(row, f"time/{name}_s", 0.0) for name in PHASES if name != "other"}
    return {"iteration": whole, **phases, "other": max(0.0, whole - sum(phases.values())), **_devices(row)}


def _devices(row: Metrics) -> dict[str, float]:
    """Where there are several devices: seconds of copying after the update, and in which each had nothing to do."""
    idle = {name: _number(row, f"time/{name}_s") for name in _IDLE.findall("\n".join(row))}
    return {"publish": _number(row, "time/publish_s"), **idle} if idle else {}


def _units(units: Sequence[UnitDone]) -> dict[str, float]:
    """Seconds of one iteration's units, by kind."""
    generated = [unit for unit in units if unit.kind is UnitKind.GENERATE]
    forwards = [unit for unit in units if unit.kind in FORWARDS]
    seconds = {
        "prefix_forward": _sum(forwards),
        "prefix_hidden": sum(_inside(unit, generated) for unit in forwards),
        "prefix_backward": _sum(unit for unit in units if unit.kind is UnitKind.PREFIX_BACKWARD),
        "score_units": _sum(unit for unit in units if unit.kind is UnitKind.SCORE),
        "suffix_units": _sum(unit for unit in units if unit.kind is UnitKind.SUFFIX),
        "generate": _sum(generated),
    }
    both = [*generated, *forwards]
    if both:
        seconds["window"] = max(unit.end_s for unit in both) - min(unit.start_s for unit in both)
    begins = [unit.decode_start_s for unit in generated]
    if begins and all(begin is not None for begin in begins):
        decode = _sum(generated, lambda unit: unit.decode_start_s or unit.start_s)
        seconds |= {"prefill": seconds["generate"] - decode, "decode": decode}
    return seconds


def _sum(units: Iterable[UnitDone], begin: Callable[[UnitDone], float] = lambda unit: unit.start_s) -> float:
    return math.fsum(unit.end_s - begin(unit) for unit in units)


def _inside(unit: UnitDone, generated: Sequence[UnitDone]) -> float:
    """Seconds of a unit between the begin of the first and the end of the last unit of rollout."""
    if not generated:
        return 0.0
    begin, end = min(one.start_s for one in generated), max(one.end_s for one in generated)
    return max(0.0, min(unit.end_s, end) - max(unit.start_s, begin))


def _decoding(part: Mapping[str, float]) -> float:
    """Seconds in which the responses of an iteration were made."""
    return part.get("decode") or part["generate"] or math.inf


def _prefix_rate(units: Sequence[UnitDone], tokens: float) -> float:
    """Tokens a second. tokens: of one prompt, its copies counted."""
    forwards = [unit for unit in units if unit.kind in FORWARDS]
    seconds = _sum(forwards)
    return tokens * sum(len(unit.groups) for unit in forwards) / seconds if seconds else 0.0


def _work_hidden(units: Sequence[UnitDone]) -> float:
    """Mean over the prefix forwards of the part of each that lies inside the rollout."""
    generated = [unit for unit in units if unit.kind is UnitKind.GENERATE]
    parts = [
        _inside(unit, generated) / (unit.end_s - unit.start_s)
        for unit in units
        if unit.kind in FORWARDS and unit.end_s > unit.start_s
    ]
    return statistics.fmean(parts) if parts else 0.0


def _peaks(observed: Iterable[MemoryObserved]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for one in observed:
        name = one.phase.lower()
        peaks[name] = max(one.used_bytes, peaks.get(name, 0))
    return peaks


def _number(row: Metrics, key: str, default: float | None = None) -> float:
    value = row.get(key, default)
    if not isinstance(value, int | float):
        raise DataError("An iteration lacks a number", got=repr(value), needed=key, where=METRICS_FILE)
    return float(value)
