"""Measures how the GPU's multiprocessors are best divided between prefix work and decoding.

Owns the order of candidates, where each one's rows are kept, and what is told. A row is one of `rollplex.bench`: a node
that runs a few iterations.

    DIR/alone          rows of serial: rollout and prefix work, each with nothing beside it
    DIR/p700d300 …     rows of overlap, one folder for each candidate; what is there is not measured again
    DIR/share.json     the result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from rollplex.bench.folder import run_dir_of
from rollplex.bench.measure import JOURNAL_FILE
from rollplex.bench.nodes import Job, run_row
from rollplex.bench.rows import Mode, Row
from rollplex.bench.schedules import Plan, run_schedules
from rollplex.bench.summary import ModeSummary
from rollplex.config import load
from rollplex.errors import ConfigError
from rollplex.journal.events import DeviceReady
from rollplex.journal.reader import Reader
from rollplex.tune.candidates import WHOLE, Candidate
from rollplex.tune.choice import Alone, Choice, Measured, choose, turns_only
from rollplex.whole_file import write_whole

SERIAL: Final = Mode(schedule="serial", prefix="shared")
OVERLAP: Final = Mode(schedule="overlap", prefix="shared")
VARIED: Final = ("device.sharing", "device.prefix_share", "device.decode_share")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked for.

    Attributes:
        config: YAML file of the run.
        overrides: `a.b=v` each.
        candidates: to be compared, the whole device first.
        repeats: rows of each.
        iterations: of each row.
        warmup: so many first iterations of each row do not count.
        out: where rows and result are kept.
        command: how it was asked for; the result keeps it.
    """

    config: Path
    overrides: Sequence[str]
    candidates: Sequence[Candidate]
    repeats: int
    iterations: int
    warmup: int
    out: Path
    command: str = ""


class Tuned(Struct, frozen=True, kw_only=True):
    """The result, as share.json has it."""

    command: str
    alone: Alone
    measured: tuple[Measured, ...]
    choice: Choice
    sharing: str
    """How the workers really shared the GPU: mps, or turns where MPS is not to be had."""
    why: str
    """Why they take turns."""


Sharing = tuple[str, str]


def tune_share(
    wanted: Wanted,
    *,
    say: Callable[[str], None],
    run: Callable[[Job], Row] = run_row,
    sharing: Callable[[Path], Sharing] | None = None,
) -> Tuned:
    """Measure what is not there yet, choose, and write share.json.

    Args:
        say: gets a line for each row.
        run: measures one row.
        sharing: how a node shared the GPU and why, by its run directory; None reads its journal.

    Raises:
        ConfigError: it does not run on a GPU, or sets what is tuned.
        StoppedError, RollplexError: as `run_schedules`; rows measured before are kept.
    """
    check(wanted)
    sharing = sharing or shared_by
    rows = _Rows(wanted=wanted, say=say, run=run)
    alone: ModeSummary | None = None
    found: dict[Candidate, ModeSummary] = {}
    used, why = "mps", ""
    for repeats in range(1, wanted.repeats + 1):  # one after the other: a machine that gets slower favours nobody
        say(f"alone, repeat {repeats}")
        alone = rows.of("alone", SERIAL, WHOLE, repeats)
        for candidate in wanted.candidates:
            if used == "turns":
                break
            say(f"{candidate.text}, repeat {repeats}")
            found[candidate] = rows.of(candidate.name, OVERLAP, candidate, repeats)
            if candidate == WHOLE:
                used, why = sharing(run_dir_of(wanted.out / candidate.name, OVERLAP, repeats - 1))
    assert alone is not None, "there is a repeat"
    nothing_beside = Alone(
        rollout_s=alone.seconds["generate"].median,
        prefix_s=alone.seconds["prefix_forward"].median,
        spread=alone.seconds["generate"].width,
    )
    measured = tuple(_measured(candidate, summary) for candidate, summary in found.items())
    tuned = Tuned(
        command=wanted.command,
        alone=nothing_beside,
        measured=measured,
        choice=turns_only() if used == "turns" else choose(nothing_beside, measured),
        sharing=used,
        why=why,
    )
    write_whole(wanted.out / "share.json", encode(tuned), durable=True)
    return tuned


def check(wanted: Wanted) -> None:
    """Refuse what cannot be tuned.

    Raises:
        ConfigError: see `tune_share`.
    """
    device = load(wanted.config, wanted.overrides).device
    if device.kind != "cuda":
        raise ConfigError(
            "Only the multiprocessors of a GPU can be shared", got=f"device.kind: {device.kind}", needed="cuda"
        )
    for text in wanted.overrides:
        if text.partition("=")[0].strip() in VARIED:
            raise ConfigError("This key is what is tuned", got=text, do="Choose with --candidates.", where="--set")


def encode(tuned: Tuned) -> bytes:
    """The result as a file has it."""
    return msgspec.json.format(msgspec.json.encode(tuned), indent=2) + b"\n"


def shared_by(run_dir: Path) -> Sharing:
    """How a node's workers shared the GPU, and why if not as was asked.

    Raises:
        JournalError: its journal cannot be read.
    """
    with Reader(run_dir / JOURNAL_FILE) as reader:
        for record in reader.events_of_type(DeviceReady):
            assert isinstance(record.event, DeviceReady), "asked for"
            return record.event.sharing_used, record.event.why
    return "turns", "the node had no GPU"


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Measures what is missing."""

    wanted: Wanted
    say: Callable[[str], None]
    run: Callable[[Job], Row]

    def of(self, name: str, mode: Mode, candidate: Candidate, repeats: int) -> ModeSummary:
        """All rows of one candidate so far."""
        wanted = self.wanted
        plan = Plan(
            config=wanted.config,
            overrides=[*wanted.overrides, *candidate.overrides],
            modes=(mode,),
            repeats=repeats,
            iterations=wanted.iterations,
            warmup=wanted.warmup,
            out=wanted.out / name,
            command=wanted.command,
        )
        return run_schedules(plan, say=self.say, run=self.run).modes[0]


def _measured(candidate: Candidate, summary: ModeSummary) -> Measured:
    return Measured(
        candidate=candidate,
        rollout_s=summary.seconds["generate"].median,
        hidden=summary.work_hidden.median,
        iteration_s=summary.seconds["iteration"].median,
        spread=summary.seconds["generate"].width,
    )
