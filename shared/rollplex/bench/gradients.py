"""How far the gradients of the schedules are from each other, given the same responses.

    responses ─► serial ─► serial again ─► overlap ─► stream      one iteration each, replayed, with `keep_gradients`
                   └────────────┴─────────────┴─────────┴──────►  differences, and whether they are within bounds

Two serial replays differ by what the hardware itself does (sums in another order); no schedule may differ by much more.
Kernels are deterministic unless asked otherwise (`run.deterministic=false`): with others two serial replays of a
model in bfloat16 differ by more on a GPU than what is to be found.
Each comparison is on disk before the next run: the same folder goes on where it ended. Only the first gradient is
kept meanwhile.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from rollplex.bench.gradient_files import Difference, difference
from rollplex.bench.nodes import FIXED, Node, run_node
from rollplex.bench.tables import Table
from rollplex.config import load
from rollplex.config.config import Config
from rollplex.errors import ConfigError
from rollplex.layout.parameters import GRADIENTS, ParameterTable, gradient_table, parameter_table
from rollplex.layout.shape import read_shape
from rollplex.whole_file import write_whole

FIRST: Final = "serial"
RUNS: Final = {"serial again": "serial", "overlap": "overlap", "stream": "stream"}
"""What is compared with the first one, and its schedule. The first of these says what the hardware does."""
DEFAULTS: Final = ("run.deterministic=true",)
"""Of every run, unless overridden: what a workload for speed has otherwise."""
TIMES: Final = 2.0
"""A schedule may differ by so many times what two serial replays differ by (bfloat16)."""
BOUNDS: Final = {"bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-5}
"""And by no more than this, relative to the norm of the gradient."""
_REPLAY: Final = (
    *FIXED,
    "run.keep_gradients=true",
    "run.share_prefix=true",
    "run.log_completions=0",
    "run.sample_every=0",
    "rollout.engine=replay",
    "optimizer.name=sgd",  # its state is smaller; the gradient does not depend on it
    "optimizer.momentum=0",
    "optimizer.max_grad_norm=0",
)


class Compared(Struct, frozen=True, kw_only=True):
    """What is known so far; the file gradients.json."""

    dtype: str
    command: str
    differences: dict[str, Difference] = {}

    @property
    def whole(self) -> bool:
        """Whether every run has been compared."""
        return all(name in self.differences for name in RUNS)

    def bound(self, name: str) -> float:
        """What the difference of a run may be."""
        again = self.differences.get("serial again")
        limit = BOUNDS[self.dtype]
        if self.dtype != "bfloat16" or again is None or name == "serial again":
            return limit
        return min(limit, TIMES * again.whole)

    @property
    def exceeded(self) -> tuple[str, ...]:
        """The runs that differ by more than they may."""
        return tuple(name for name, found in self.differences.items() if not found.whole <= self.bound(name))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison to make.

    Attributes:
        config: YAML file of the workload.
        overrides: `a.b=v` each.
        responses: a completions.jsonl with tokens; None: a first run, with the engine of CONFIG, records them.
        spread_s: seconds over which the ends of the responses are spread, so that there is something to overlap.
        out: the folder.
        limit: so many runs at most; 0: all.
        command: how it was asked for.
    """

    config: Path
    overrides: Sequence[str]
    responses: Path | None
    spread_s: float
    out: Path
    limit: int = 0
    command: str = ""


def compare_gradients(
    wanted: Comparison, *, say: Callable[[str], None], run: Callable[[Node], Path] = run_node
) -> Compared:
    """Make the runs that are not there yet, and compare.

    Args:
        say: gets a line for each run.
        run: runs one node; returns its run directory.

    Raises:
        ConfigError: a configuration that cannot run, or a folder of another comparison.
        StoppedError: a signal ended it.
        RollplexError: a run failed, or kept no gradient.
    """
    recorded = wanted.responses and wanted.responses.absolute()
    replayed = () if recorded is None else ("rollout.engine=replay", f"rollout.replay={recorded}")
    config = load(
        wanted.config, [*DEFAULTS, *wanted.overrides, *FIXED, *replayed]
    )  # SGLang would not record in float32
    shape = read_shape(config.model.path)
    model = parameter_table(shape, dtype=config.model.dtype, freeze_vision=config.model.freeze_vision)
    table = gradient_table(model)
    wanted.out.mkdir(parents=True, exist_ok=True)
    runs = _Runs(wanted, config, table, say, run)
    compared = _read(wanted, config.model.dtype)
    for name, schedule in ((FIRST, "serial"), *RUNS.items()):
        if name in compared.differences or (name == FIRST and (compared.whole or runs.first.is_file())):
            continue
        if not runs.another:
            say(f"{wanted.limit} runs were made; the same command goes on")
            return compared
        kept = runs.replay(name, schedule)
        if name == FIRST:
            kept.replace(runs.first)
            continue
        found = difference(runs.first, kept, table)
        kept.unlink()
        compared = msgspec.structs.replace(compared, differences={**compared.differences, name: found})
        write_whole(
            wanted.out / "gradients.json",
            msgspec.json.format(msgspec.json.encode(compared), indent=2) + b"\n",
            durable=True,
        )
        say(f"{name}: differs from the first serial replay by {found.whole:.2e} (bound {compared.bound(name):.1e})")
    runs.first.unlink(missing_ok=True)
    return compared


def table_of(compared: Compared) -> Table:
    """One line a run."""
    rows = tuple(
        (
            name,
            _number(found.whole),
            _number(compared.bound(name)),
            "no" if name in compared.exceeded else "yes",
            _number(found.worst),
            found.parameter,
        )
        for name, found in compared.differences.items()
    )
    head = ("compared with serial", "difference / norm", "bound", "within", "worst parameter", "which")
    return Table(head=head, rows=rows)


class _Runs:
    """The runs of one comparison, no more than may be made."""

    def __init__(
        self,
        wanted: Comparison,
        config: Config,
        table: ParameterTable,
        say: Callable[[str], None],
        run: Callable[[Node], Path],
    ) -> None:
        self._wanted = wanted
        self._prompts = config.data.prompts_per_iteration
        self._table = table
        self._say = say
        self._run = run
        self._made = 0
        self.first = wanted.out / "first.bin"

    @property
    def another(self) -> bool:
        return not self._wanted.limit or self._made < self._wanted.limit

    def replay(self, name: str, schedule: str) -> Path:
        """Run one; returns the file of its gradient."""
        responses = self._responses()
        spread = f"rollout.replay_s={self._wanted.spread_s}"
        overrides = [*_REPLAY, f"rollout.replay={responses}", spread, f"run.schedule={schedule}"]
        run_dir = self._node(name, overrides)
        file = run_dir / GRADIENTS / "step_0.bin"
        if not file.is_file():
            raise ConfigError(
                "A replayed iteration made no update, so that there is no gradient to compare",
                do="Give the bench rewards that differ within a group.",
                where=str(run_dir),
            )
        return file

    def _responses(self) -> Path:
        if self._wanted.responses is not None:
            return self._wanted.responses.absolute()
        kept = self._wanted.out / "responses.jsonl"
        if not kept.is_file():
            self._say("recording responses")
            overrides = [*FIXED, "run.log_tokens=true", f"run.log_completions={self._prompts}", "run.schedule=serial"]
            run_dir = self._node("recorded", overrides)
            shutil.copyfile(run_dir / "completions.jsonl", kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)
        return kept

    def _node(self, name: str, overrides: Sequence[str]) -> Path:
        short = name.replace(" ", "-")
        self._made += 1
        return self._run(
            Node(
                what=name,
                config=self._wanted.config,
                overrides=[*DEFAULTS, *self._wanted.overrides, *overrides],
                iterations=1,
                run_dir=self._wanted.out / "runs" / short,
                log=self._wanted.out / "logs" / f"{short}.log",
            )
        )


def _read(wanted: Comparison, dtype: str) -> Compared:
    file = wanted.out / "gradients.json"
    if not file.is_file():
        return Compared(dtype=dtype, command=wanted.command)
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Compared)
    except msgspec.DecodeError as error:
        raise ConfigError("This file is not a comparison's", got=str(error), where=str(file)) from None
    if found.dtype != dtype:
        raise ConfigError(
            "The comparison in this folder is of another configuration",
            got=f"model.dtype {found.dtype} there, {dtype} now",
            do="Choose another --out.",
            where=str(wanted.out),
        )
    return found


def _number(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.2e}" if math.isfinite(value) else "inf"
