"""How far the gradients of several devices are from those of one, given the same weights and responses.

    one device: N iterations, with every response, gradient and checkpoint kept
      └─► each layout and iteration: a node that goes on from the checkpoint before it and replays its responses ─►
          gradient against gradient, bytes copied after the update, how long that took, how long devices were idle

Each comparison is on disk before the next node: the same folder goes on where it ended.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from rollplex.bench.folder import write_whole
from rollplex.bench.gradient_files import Difference, difference
from rollplex.bench.gradients import BOUNDS
from rollplex.bench.measure import read_metrics
from rollplex.bench.nodes import Command, Node, run_node, start_command
from rollplex.bench.tables import Table
from rollplex.checkpoint.folder import CHECKPOINTS
from rollplex.cli.start import Prepared, resume_command
from rollplex.config import load
from rollplex.config.config import Config
from rollplex.errors import ConfigError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.tally import tally
from rollplex.layout.parameters import GRADIENTS, gradient_table, parameter_table
from rollplex.layout.shape import read_shape

_LAYOUT: Final = re.compile(r"(\d+)x(\d+)/(\d+)x(\d+)")
_SAME: Final = ("eval=[]", "run.alternate=[]", "run.schedule=serial", "rollout.sglang.own_weights=false")
_ACCEPTED: Final = ("parallel", "rollout", "batching", "run")
"""A node that goes on from the one device's checkpoint differs in these, which is what is to be compared."""
RunNode = Callable[[Node, Command], Path]


class Layout(Struct, frozen=True, kw_only=True):
    """Degrees and numbers of teams: training TP x replicas / rollout TP x engines, on the same devices."""

    training: int
    replicas: int
    rollout: int
    engines: int

    @property
    def devices(self) -> int:
        return self.training * self.replicas

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            f"parallel.devices={self.devices}",
            f"parallel.training={self.training}",
            f"parallel.rollout={self.rollout}",
        )

    def __str__(self) -> str:
        return f"{self.training}x{self.replicas}/{self.rollout}x{self.engines}"


class Found(Struct, frozen=True, kw_only=True):
    """One iteration of one layout."""

    difference: Difference
    refreshed_bytes: int
    """After the update, of all devices."""
    rebuilt_bytes: int
    publish_s: float
    step_s: float
    idle_s: tuple[float, ...]
    """By device."""


class Compared(Struct, frozen=True, kw_only=True):
    """What is known so far; the file parallel.json."""

    dtype: str
    command: str
    iterations: int
    aliased_bytes: dict[str, int] = {}
    """By layout, of all devices."""
    found: dict[str, tuple[Found, ...]] = {}
    """By layout, in the order of iterations."""

    @property
    def exceeded(self) -> tuple[str, ...]:
        """Layouts of which a gradient is further from the one device's than it may be."""
        bound = BOUNDS[self.dtype]
        return tuple(
            layout for layout, found in self.found.items() if not all(one.difference.whole <= bound for one in found)
        )


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A comparison to make.

    Attributes:
        config: YAML file of the workload, of one device.
        overrides: `a.b=v` each.
        layouts: as `parse_layouts` has them.
        iterations: so many of each.
        out: the folder.
        limit: so many nodes at most; 0: all.
        command: how it was asked for.
    """

    config: Path
    overrides: Sequence[str]
    layouts: Sequence[Layout]
    iterations: int
    out: Path
    limit: int = 0
    command: str = ""


def run(node: Node, command: Command) -> Path:
    """As `run_node`, whose errors come out."""
    return run_node(node, command=command)


def parse_layouts(text: str) -> tuple[Layout, ...]:
    """Layouts such as 4x1/2x2, with commas.

    Raises:
        ConfigError: not one, or its two sides need different numbers of devices.
    """
    return tuple(_layout(part.strip()) for part in text.split(","))


def compare_layouts(
    wanted: Wanted,
    *,
    say: Callable[[str], None],
    run: RunNode,
) -> Compared:
    """Make the nodes that are not there yet, and compare.

    Args:
        say: gets a line for each node.
        run: runs one node, whose coordinator is started by a command; returns its run directory.

    Raises:
        ConfigError: a configuration that cannot run, or a folder of another comparison.
        StoppedError: a signal ended it.
        RollplexError: a node failed, or kept no gradient.
    """
    config = load(wanted.config, [*wanted.overrides, *_SAME])
    runs = _Runs(wanted, config, run)
    compared = _read(wanted, config)
    wanted.out.mkdir(parents=True, exist_ok=True)
    if not runs.reference_is_there:
        say(f"one device: {wanted.iterations} iterations")
        runs.reference()
    for layout in wanted.layouts:
        for step in range(len(compared.found.get(str(layout), ())), wanted.iterations):
            if not runs.another:
                say(f"{wanted.limit} nodes were started; the same command goes on")
                return compared
            found = runs.compare(layout, step)
            compared = _with(compared, layout, found, runs.aliased(layout))
            text = msgspec.json.format(msgspec.json.encode(compared), indent=2)
            write_whole(wanted.out / "parallel.json", text + b"\n")
            say(f"{layout}, iteration {step}: differs by {found.difference.whole:.2e}")
    return compared


def table_of(compared: Compared) -> Table:
    """One line an iteration."""
    head = (
        *("layout", "iteration", "difference / norm", "worst parameter", "aliased", "refreshed", "rebuilt"),
        *("publish ms", "idle of devices"),
    )
    rows = tuple(
        (
            layout,
            str(step),
            f"{one.difference.whole:.2e}",
            f"{one.difference.worst:.2e}",
            f"{compared.aliased_bytes[layout]:,}",
            f"{one.refreshed_bytes:,}",
            f"{one.rebuilt_bytes:,}",
            f"{one.publish_s * 1e3:.1f}",
            " ".join(f"{idle / one.step_s:.0%}" for idle in one.idle_s),
        )
        for layout, found in compared.found.items()
        for step, one in enumerate(found)
    )
    return Table(head=head, rows=rows)


class _Runs:
    """The nodes of one comparison, no more than may be started."""

    def __init__(self, wanted: Wanted, config: Config, run: RunNode) -> None:
        self._wanted = wanted
        self._prompts = config.data.prompts_per_iteration
        self._run = run
        self._made = 0
        self._shape = read_shape(config.model.path)
        self._model = parameter_table(self._shape, dtype=config.model.dtype, freeze_vision=config.model.freeze_vision)
        self._table = gradient_table(self._model)
        self._one = wanted.out / "runs" / "one"

    @property
    def another(self) -> bool:
        return not self._wanted.limit or self._made < self._wanted.limit

    @property
    def reference_is_there(self) -> bool:
        return _gradient(self._one, self._wanted.iterations - 1).is_file()

    def reference(self) -> None:
        """The run of one device."""
        recorded = (
            *("run.log_tokens=true", f"run.log_completions={self._prompts}", "run.keep_gradients=true"),
            *("checkpoint.every=1", f"checkpoint.keep={self._wanted.iterations}", "parallel.devices=1"),
        )
        self._node("one", recorded, self._wanted.iterations, start_command)

    def compare(self, layout: Layout, step: int) -> Found:
        """One iteration under a layout, from the weights that the one device had."""
        name = f"{layout}-{step}".replace("/", "-")
        overrides = (
            *layout.overrides,
            *("run.keep_gradients=true", "run.log_tokens=false", "run.log_completions=0", "run.sample_every=0"),
            *("checkpoint.every=0", "checkpoint.at_end=false"),
            *("rollout.engine=replay", f"rollout.replay={(self._one / 'completions.jsonl').absolute()}"),
        )
        run_dir = self._node(name, overrides, 1, self._going_on_from(name, step) if step else start_command)
        kept = _gradient(run_dir, step)
        if not kept.is_file():
            raise ConfigError(
                "A replayed iteration made no update, so that there is no gradient to compare",
                do="Give the bench rewards that differ within a group.",
                where=str(run_dir),
            )
        found = difference(_gradient(self._one, step), kept, self._table)
        row = read_metrics(run_dir)[-1]
        kept.unlink()
        return Found(
            difference=found,
            refreshed_bytes=int(_number(row, "refreshed_bytes")),
            rebuilt_bytes=int(_number(row, "rebuilt_bytes")),
            publish_s=_number(row, "time/publish_s"),
            step_s=_number(row, "time/step_s"),
            idle_s=tuple(_number(row, f"time/idle/0:{device}_s") for device in range(layout.devices)),
        )

    def aliased(self, layout: Layout) -> int:
        """Bytes that training and rollout share without a copy, on all devices."""
        degrees = TrainingLayout(degree=layout.training), RolloutLayout(degree=layout.rollout)
        group = plan(self._model, self._shape, *degrees).devices
        one = sum(tally(device, header_bytes=self._model.header_bytes).aliased for device in group)
        return one * (layout.devices // len(group))

    def _going_on_from(self, name: str, step: int) -> Command:
        """The command of a node that begins where the one device was before iteration `step`."""
        folder = self._wanted.out / "runs" / name / CHECKPOINTS
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        folder.parent.chmod(0o700)  # as a run directory must be
        shutil.copytree(self._one / CHECKPOINTS / f"step_{step}", folder / f"step_{step}")

        def command(prepared: Prepared, iterations: int) -> list[str]:
            going_on = resume_command(
                prepared.run_dir,
                prepared.config_file,
                (),
                checkpoint=None,
                accepted=_ACCEPTED,
                iterations=step + iterations,
                serve=False,
            )
            return [*going_on, "--die-with-parent"]

        return command

    def _node(self, name: str, overrides: Sequence[str], iterations: int, command: Command) -> Path:
        self._made += 1
        node = Node(
            what=name,
            config=self._wanted.config,
            overrides=[*self._wanted.overrides, *_SAME, *overrides],
            iterations=iterations,
            run_dir=self._wanted.out / "runs" / name,
            log=self._wanted.out / "logs" / f"{name}.log",
        )
        return self._run(node, command)


def _layout(text: str) -> Layout:
    match = _LAYOUT.fullmatch(text)
    numbers = [int(number) for number in match.groups()] if match else []
    if not numbers or 0 in numbers or numbers[0] * numbers[1] != numbers[2] * numbers[3]:
        raise ConfigError(
            "This is no layout of devices",
            got=text,
            needed="training TP x replicas / rollout TP x engines, with as many devices on both sides: 4x1/2x2",
        )
    training, replicas, rollout, engines = numbers
    return Layout(training=training, replicas=replicas, rollout=rollout, engines=engines)


def _gradient(run_dir: Path, step: int) -> Path:
    return run_dir / GRADIENTS / f"step_{step}.bin"


def _number(row: Mapping[str, object], name: str) -> float:
    value = row.get(name, 0.0)
    assert isinstance(value, int | float), f"{name} is a number"
    return float(value)


def _with(compared: Compared, layout: Layout, found: Found, aliased: int) -> Compared:
    name = str(layout)
    return msgspec.structs.replace(
        compared,
        found={**compared.found, name: (*compared.found.get(name, ()), found)},
        aliased_bytes={**compared.aliased_bytes, name: aliased},
    )


def _read(wanted: Wanted, config: Config) -> Compared:
    file = wanted.out / "parallel.json"
    fresh = Compared(dtype=config.model.dtype, command=wanted.command, iterations=wanted.iterations)
    if not file.is_file():
        return fresh
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=Compared)
    except msgspec.DecodeError as error:
        raise ConfigError("This file is not a comparison's", got=str(error), where=str(file)) from None
    if (kept.dtype, kept.iterations) != (fresh.dtype, fresh.iterations):
        raise ConfigError(
            "The comparison in this folder is of another configuration",
            got=f"{kept.iterations} iterations in {kept.dtype} there, {fresh.iterations} in {fresh.dtype} now",
            do="Choose another --out.",
            where=str(wanted.out),
        )
    return kept
