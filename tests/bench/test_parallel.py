"""The comparison of several devices with one, with a fake instead of nodes: what each is told, and where it begins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollplex.bench.nodes import Command, Node, StoppedError
from rollplex.bench.parallel import Wanted, compare_layouts
from rollplex.bench.parallel_report import notes, table_of
from rollplex.bench.placement import parse_placements
from rollplex.bench.weight_files import WeightsDifference
from rollplex.bench.workload import Workload
from rollplex.cli.bench import bench_parallel
from rollplex.cli.start import prepare
from rollplex.config import load
from rollplex.errors import ConfigError, RollplexError
from rollplex.layout.parameters import gradient_table, parameter_table
from rollplex.layout.shape import read_shape

METRICS = {"refreshed_bytes": 30.0, "rebuilt_bytes": 4.0, "time/publish_s": 0.002, "time/step_s": 2.0}


class Nodes:
    """Leaves gradients of ones, off by `off[name]` of themselves; keeps names, overrides and commands in order."""

    def __init__(self, workload: Workload, **off: float) -> None:
        self._shape = read_shape(workload.config.parent / "model")
        self._off = off
        self.nodes: list[Node] = []
        self.commands: list[list[str]] = []
        self.fails_at = ""

    @property
    def names(self) -> list[str]:
        return [node.what for node in self.nodes]

    def __call__(self, node: Node, command: Command) -> Path:
        if node.what == self.fails_at:
            raise RollplexError("the node broke")
        prepared = prepare(node.config, list(node.overrides), node.run_dir, node.run_dir.parent)
        self.nodes.append(node)
        self.commands.append(command(prepared, node.iterations))
        (node.run_dir / "gradients").mkdir()
        (node.run_dir / "completions.jsonl").touch()
        steps = range(node.iterations) if node.what == "one" else [0 if node.what == "float32" else int(node.what[-1])]
        dtype: torch.dtype = getattr(torch, prepared.config.model.dtype)
        table = gradient_table(parameter_table(self._shape, dtype=prepared.config.model.dtype, freeze_vision=False))
        for step in steps:
            numbers = table.total_bytes // dtype.itemsize
            gradient = torch.full((numbers,), 1.0 + self._off.get(node.what, 0.0), dtype=dtype).view(torch.uint8)
            (node.run_dir / "gradients" / f"step_{step}.bin").write_bytes(gradient.numpy().tobytes())
        for step in steps if node.what == "one" or prepared.config.checkpoint.at_end else ():
            checkpoint = node.run_dir / "checkpoints" / f"step_{step + 1}"
            checkpoint.mkdir(parents=True)
            write = {"x": torch.tensor([step + 1.0 + self._off.get(node.what, 0.0)])}
            save_file(write, checkpoint / "model.safetensors")
        idle = {f"time/idle/0:{device}_s": 0.5 for device in range(4)}
        (node.run_dir / "metrics.jsonl").write_text(json.dumps({**METRICS, **idle}) + "\n")
        return node.run_dir


@pytest.fixture
def wanted(workload: Workload, tmp_path: Path) -> Wanted:
    return Wanted(
        config=workload.config,
        overrides=["run.seed=3"],
        layouts=parse_placements("2x1/1x2, 1x2/2x1"),
        iterations=2,
        out=tmp_path / "out",
    )


def _silent(_: str) -> None:
    pass


def test_every_iteration_goes_on_from_the_one_devices_checkpoint_before_it(workload: Workload, wanted: Wanted) -> None:
    nodes = Nodes(workload)
    compared = compare_layouts(wanted, say=_silent, run=nodes)
    assert nodes.names == ["one", "2x1-1x2-0", "2x1-1x2-1", "1x2-2x1-0", "1x2-2x1-1"]
    reference, first, second, *_ = nodes.nodes
    assert {"run.keep_gradients=true", "checkpoint.every=1", "parallel.devices=1"} <= set(reference.overrides)
    assert {"parallel.devices=2", "parallel.training=2", "parallel.rollout=1"} <= set(first.overrides)
    assert {load(node.config, list(node.overrides)).run.deterministic for node in nodes.nodes} == {True}
    assert {"parallel.training=1", "parallel.rollout=2"} <= set(nodes.nodes[3].overrides)
    assert f"rollout.replay={reference.run_dir / 'completions.jsonl'}" in second.overrides
    assert "--resume" not in nodes.commands[1]
    assert "--resume" in nodes.commands[2]
    assert nodes.commands[2][nodes.commands[2].index("--iterations") + 1] == "2"
    assert [folder.name for folder in (second.run_dir / "checkpoints").iterdir()] == ["step_1"]
    assert compared.exceeded == ()
    assert len(list(wanted.out.rglob("*.bin"))) == 2, "only the one device's stay"


def test_a_gradient_that_is_too_far_is_named_by_its_layout(workload: Workload, wanted: Wanted) -> None:
    compared = compare_layouts(wanted, say=_silent, run=Nodes(workload, **{"1x2-2x1-1": 1e-4, "2x1-1x2-0": 1e-6}))
    assert compared.exceeded == ("1x2/2x1",)
    assert compared.found["1x2/2x1"][1].difference.whole == pytest.approx(1e-4, rel=0.1)
    row = table_of(compared).rows[3]
    assert row[:3] == ("1x2/2x1", "1", "1.00e-04")
    assert row[-4:] == ("30", "4", "2.0", "25% 25%")


def test_a_comparison_that_was_ended_goes_on_with_the_node_that_is_missing(workload: Workload, wanted: Wanted) -> None:
    first = Nodes(workload)
    first.fails_at = "1x2-2x1-0"
    with pytest.raises(RollplexError, match="the node broke"):
        compare_layouts(wanted, say=_silent, run=first)
    second = Nodes(workload)
    compare_layouts(wanted, say=_silent, run=second)
    assert second.names == ["1x2-2x1-0", "1x2-2x1-1"]


def test_no_more_nodes_than_asked_for_are_started_at_a_time(workload: Workload, wanted: Wanted) -> None:
    limited = Wanted(**{**vars(wanted), "limit": 2})
    turns = [Nodes(workload) for _ in range(3)]
    for nodes in turns:
        compare_layouts(limited, say=_silent, run=nodes)
    assert [len(nodes.names) for nodes in turns] == [2, 2, 1]


@pytest.mark.parametrize(("apart", "exceeded"), [(1 / 32, ()), (1 / 8, ("2x1/1x2",))])
def test_in_bfloat16_a_layout_is_held_to_what_one_device_itself_differs_by(
    workload: Workload, wanted: Wanted, apart: float, exceeded: tuple[str, ...]
) -> None:
    half = replace(wanted, overrides=["model.dtype=bfloat16"], layouts=parse_placements("2x1/1x2"))
    nodes = Nodes(workload, **{"1x1-1x1-1": 1 / 64, "float32": 1 / 32, "2x1-1x2-1": apart})
    compared = compare_layouts(half, say=_silent, run=nodes)
    assert nodes.names == ["one", "1x1-1x1-0", "1x1-1x1-1", "float32", "2x1-1x2-0", "2x1-1x2-1"]
    assert "model.dtype=float32" in nodes.nodes[3].overrides
    assert compared.noise == pytest.approx(1 / 32)
    assert compared.bound == pytest.approx(1 / 16)
    assert compared.exceeded == exceeded
    told = "\n".join(notes(compared))
    assert "1.56e-02 when its own iterations are repeated" in told
    assert "3.12e-02 between its first iteration and the same in float32" in told
    assert ("exceeded by 2x1/1x2" in told) == bool(exceeded)


def test_where_float32_does_not_fit_the_layouts_are_compared_without_it(workload: Workload, wanted: Wanted) -> None:
    class Small(Nodes):
        def __call__(self, node: Node, command: Command) -> Path:
            if node.what == "float32":
                raise ConfigError("does not fit")
            return super().__call__(node, command)

    said: list[str] = []
    half = replace(wanted, overrides=["model.dtype=bfloat16"], layouts=parse_placements("2x1/1x2"), iterations=1)
    compared = compare_layouts(half, say=said.append, run=Small(workload, **{"2x1-1x2-0": 1 / 32}))
    assert any("left out: does not fit" in line for line in said)
    assert (compared.rounding, compared.exceeded) == (None, ("2x1/1x2",))


def test_weights_after_each_update_are_compared_if_that_is_asked_for(
    workload: Workload, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, Path, Path]] = []

    def compare(before: Path, one: Path, other: Path) -> WeightsDifference:
        asked.append((before, one, other))
        assert other.is_dir()
        return WeightsDifference(whole=0.25, largest=1e-3, unequal=0.5, changed=1.0)

    monkeypatch.setattr("rollplex.bench.parallel.weights_difference", compare)
    nodes = Nodes(workload)
    compared = compare_layouts(
        replace(wanted, weights=True, layouts=parse_placements("2x1/1x2")), say=_silent, run=nodes
    )
    one, last = nodes.nodes[0].run_dir / "checkpoints", nodes.nodes[2].run_dir / "checkpoints"
    assert [ask[0].name for ask in asked] == ["model", "step_1"]
    assert asked[1] == (one / "step_1", one / "step_2", last / "step_2")
    assert not last.exists(), "checkpoints of layouts take room"
    assert "2x1/1x2, weights after iteration 1: the difference is 2.50e-01 of the update" in "\n".join(notes(compared))


def test_one_iteration_needs_no_checkpoint(workload: Workload, wanted: Wanted) -> None:
    nodes = Nodes(workload)
    compare_layouts(replace(wanted, iterations=1), say=_silent, run=nodes)
    assert "checkpoint.every=0" in nodes.nodes[0].overrides
    assert all("--resume" not in command for command in nodes.commands)


def test_the_folder_of_another_comparison_is_refused(workload: Workload, wanted: Wanted) -> None:
    compare_layouts(wanted, say=_silent, run=Nodes(workload))
    with pytest.raises(ConfigError, match="2 iterations in float32 there, 3 in float32 now"):
        compare_layouts(Wanted(**{**vars(wanted), "iterations": 3}), say=_silent, run=Nodes(workload))


@pytest.mark.parametrize(("off", "code"), [({}, 0), ({"2x1-1x2-0": 1e-3}, 1)])
def test_the_command_prints_a_line_for_each_iteration_and_fails_if_one_is_too_far(
    workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str], off: dict[str, float], code: int
) -> None:
    found = bench_parallel(
        workload.config,
        overrides=[],
        layouts="2x1/1x2",
        iterations=1,
        limit=0,
        out=tmp_path / "out",
        runs_dir=tmp_path,
        markdown=True,
        command="rollplex bench parallel",
        run=Nodes(workload, **off),
    )
    assert found == code
    assert "| 2x1/1x2 | 0 |" in capsys.readouterr().out


def test_a_signal_ends_the_command_with_its_code(workload: Workload, tmp_path: Path) -> None:
    def stop(_node: Node, _command: Command) -> Path:
        stopped = StoppedError("The bench was stopped")
        stopped.exit_code = 130
        raise stopped

    given = {"overrides": [], "layouts": "2x1/1x2", "iterations": 1, "limit": 0, "markdown": False, "command": ""}
    assert bench_parallel(workload.config, out=tmp_path / "out", runs_dir=tmp_path, run=stop, **given) == 130  # type: ignore[arg-type]
