"""How far the gradients of several devices are from those of one, given the same weights and responses.

    one device: N iterations, with every response, gradient and checkpoint kept
      └─► each layout and iteration: a node that goes on from the checkpoint before it and replays its responses ─►
          gradient against gradient, bytes copied after the update, how long that took, how long devices were idle

In bfloat16 a layout may differ by `gradients.TIMES` what one device differs by: from its own repetition, and from the
first iteration in float32, whose weights are the same (numbers are rounded at other places then, as they are by ranks).
Kernels are deterministic unless asked otherwise (`run.deterministic=false`), so that the former is often 0.

Each comparison is on disk before the next node: the same folder goes on where it ended.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from rollplex.bench.gradient_files import Difference, difference
from rollplex.bench.machine import read_machine, read_software
from rollplex.bench.measure import read_metrics
from rollplex.bench.nodes import Command, Node, run_node, start_command
from rollplex.bench.parallel_report import AGAIN, Compared, Found
from rollplex.bench.placement import Placement
from rollplex.bench.weight_files import WeightsDifference, weights_difference
from rollplex.checkpoint.folder import CHECKPOINTS
from rollplex.cli.start import Prepared, resume_command
from rollplex.config import load
from rollplex.config.config import Config
from rollplex.errors import ConfigError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parallel.tally import tally
from rollplex.layout.parameters import GRADIENTS, ParameterTable, gradient_table, parameter_table
from rollplex.layout.shape import read_shape
from rollplex.whole_file import write_whole

_DEFAULTS: Final = ("run.deterministic=true",)
"""Of every node, unless overridden: what a workload for speed has otherwise."""
_SAME: Final = ("eval=[]", "run.alternate=[]", "run.schedule=serial", "rollout.sglang.own_weights=false")
_FLOAT32: Final = "float32"
_ACCEPTED: Final = ("parallel", "rollout", "batching", "run")
"""A node that goes on from the one device's checkpoint differs in these, which is what is to be compared."""
RunNode = Callable[[Node, Command], Path]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A comparison to make.

    Attributes:
        config: YAML file of the workload, of one device.
        overrides: `a.b=v` each.
        layouts: in the order of the result.
        iterations: so many of each.
        out: the folder.
        limit: so many nodes at most; 0: all.
        weights: compare also the weights after each update, for which every node writes a checkpoint.
        command: how it was asked for.
    """

    config: Path
    overrides: Sequence[str]
    layouts: Sequence[Placement]
    iterations: int
    out: Path
    limit: int = 0
    weights: bool = False
    command: str = ""


def run(node: Node, command: Command) -> Path:
    """As `run_node`, whose errors come out."""
    return run_node(node, command=command)


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
    config = load(wanted.config, [*_DEFAULTS, *wanted.overrides, *_SAME])
    runs = _Runs(wanted, config, run)
    compared = _read(wanted, config)
    wanted.out.mkdir(parents=True, exist_ok=True)
    if not runs.reference_is_there:
        say(f"one device: {wanted.iterations} iterations")
        runs.reference()
    rounded = config.model.dtype == "bfloat16"
    left_out = False
    for layout in (*((AGAIN,) if rounded else ()), *wanted.layouts):
        there = len(compared.found.get(str(layout)) or ())
        for step in range(there, wanted.iterations):
            if not runs.another:
                say(f"{wanted.limit} nodes were started; the same command goes on")
                return compared
            compared = _with(compared, layout, runs.compare(layout, step), runs.aliased(layout))
            _keep(wanted, compared)
            say(f"{layout}, iteration {step}: differs by {compared.found[str(layout)][step].difference.whole:.2e}")
        if rounded and compared.rounding is None and not left_out:
            if not runs.another:
                say(f"{wanted.limit} nodes were started; the same command goes on")
                return compared
            try:
                rounding = runs.rounding()
            except ConfigError as error:  # most often: it does not fit
                say(f"one device in float32 is left out: {error}")
                left_out = True
                continue
            compared = msgspec.structs.replace(compared, rounding=rounding)
            _keep(wanted, compared)
            say(f"one device in float32, iteration 0: differs by {rounding.whole:.2e}")
    return compared


class _Runs:
    """The nodes of one comparison, no more than may be started."""

    def __init__(self, wanted: Wanted, config: Config, run: RunNode) -> None:
        self._wanted = wanted
        self._prompts = config.data.prompts_per_iteration
        self._run = run
        self._made = 0
        self._folder = config.model.path
        self._shape = read_shape(self._folder)
        self._freeze_vision = config.model.freeze_vision
        self._model = parameter_table(self._shape, dtype=config.model.dtype, freeze_vision=self._freeze_vision)
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
        iterations = self._wanted.iterations
        recorded = (
            *("run.log_tokens=true", f"run.log_completions={self._prompts}", "run.keep_gradients=true"),
            *AGAIN.overrides,
            # The first goes on from the model folder.
            f"checkpoint.every={1 if iterations > 1 or self._wanted.weights else 0}",
            *(f"checkpoint.keep={iterations}", "checkpoint.at_end=false"),
        )
        self._node("one", recorded, self._wanted.iterations, start_command)

    def compare(self, layout: Placement, step: int) -> Found:
        """One iteration under a layout, from the weights that the one device had."""
        name = f"{layout}-{step}".replace("/", "-")
        written = (f"checkpoint.at_end={'true' if self._wanted.weights else 'false'}",)
        command = self._going_on_from(name, step) if step else start_command
        run_dir = self._replay(name, [*layout.overrides, *written], command)
        found = self._difference(run_dir, step, self._table)
        row = read_metrics(run_dir)[-1]
        return Found(
            difference=found,
            refreshed_bytes=int(_number(row, "refreshed_bytes")),
            rebuilt_bytes=int(_number(row, "rebuilt_bytes")),
            publish_s=_number(row, "time/publish_s"),
            step_s=_number(row, "time/step_s"),
            idle_s=tuple(_number(row, name) for name in _idle_names(layout) if name in row),
            weights=self._weights(run_dir, step) if self._wanted.weights else None,
        )

    def rounding(self) -> Difference:
        """One device's first iteration, in float32."""
        model = parameter_table(self._shape, dtype=_FLOAT32, freeze_vision=self._freeze_vision)
        smaller = ("optimizer.name=sgd", "optimizer.momentum=0")  # the gradient does not depend on its state
        run_dir = self._replay(_FLOAT32, [*AGAIN.overrides, *smaller, f"model.dtype={_FLOAT32}"], start_command)
        return self._difference(run_dir, 0, gradient_table(model))

    def _weights(self, run_dir: Path, step: int) -> WeightsDifference:
        """Of a node's checkpoint, which is then gone."""
        after = f"{CHECKPOINTS}/step_{step + 1}"
        before = self._one / CHECKPOINTS / f"step_{step}" if step else self._folder
        found = weights_difference(before, self._one / after, run_dir / after)
        shutil.rmtree(run_dir / CHECKPOINTS)
        return found

    def _replay(self, name: str, overrides: Sequence[str], command: Command) -> Path:
        """A node with the one device's responses, which keeps its gradient."""
        responses = (self._one / "completions.jsonl").absolute()
        replayed = (
            *("run.keep_gradients=true", "run.log_tokens=false", "run.log_completions=0", "run.sample_every=0"),
            *("checkpoint.every=0", "checkpoint.at_end=false"),
            *("rollout.engine=replay", f"rollout.replay={responses}"),
        )
        return self._node(name, [*replayed, *overrides], 1, command)

    def _difference(self, run_dir: Path, step: int, table: ParameterTable) -> Difference:
        """Of a node's gradient, which is then gone."""
        kept = _gradient(run_dir, step)
        if not kept.is_file():
            raise ConfigError(
                "A replayed iteration made no update, so that there is no gradient to compare",
                do="Give the bench rewards that differ within a group.",
                where=str(run_dir),
            )
        found = difference(_gradient(self._one, step), kept, self._table, table)
        kept.unlink()
        return found

    def aliased(self, layout: Placement) -> int:
        """Bytes that training and rollout share without a copy, on all devices."""
        if layout.apart:
            return 0
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
            overrides=[*_DEFAULTS, *self._wanted.overrides, *_SAME, *overrides],
            iterations=iterations,
            run_dir=self._wanted.out / "runs" / name,
            log=self._wanted.out / "logs" / f"{name}.log",
        )
        return self._run(node, command)


def _gradient(run_dir: Path, step: int) -> Path:
    return run_dir / GRADIENTS / f"step_{step}.bin"


def _idle_names(layout: Placement) -> list[str]:
    """Keys of a line of metrics; of one device there are none."""
    return [f"time/idle/0:{device}_s" for device in range(layout.devices)]


def _number(row: Mapping[str, object], name: str) -> float:
    value = row.get(name, 0.0)
    assert isinstance(value, int | float), f"{name} is a number"
    return float(value)


def _with(compared: Compared, layout: Placement, found: Found, aliased: int) -> Compared:
    name = str(layout)
    return msgspec.structs.replace(
        compared,
        found={**compared.found, name: (*compared.found.get(name, ()), found)},
        aliased_bytes={**compared.aliased_bytes, name: aliased},
    )


def _keep(wanted: Wanted, compared: Compared) -> None:
    text = msgspec.json.format(msgspec.json.encode(compared), indent=2)
    write_whole(wanted.out / "parallel.json", text + b"\n", durable=True)


def _read(wanted: Wanted, config: Config) -> Compared:
    file = wanted.out / "parallel.json"
    devices = max(layout.devices for layout in wanted.layouts)
    fresh = Compared(
        dtype=config.model.dtype,
        command=wanted.command,
        iterations=wanted.iterations,
        machine=read_machine(config.device.gpu if config.device.kind == "cuda" else None, devices).text,
        software=read_software().text,
    )
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
