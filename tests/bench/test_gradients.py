"""The comparison of gradients: its runs and bounds with a fake instead of nodes; and once with nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollplex.bench.gradient_files import Difference
from rollplex.bench.gradients import Compared, Comparison, compare_gradients, table_of
from rollplex.bench.nodes import Node, StoppedError
from rollplex.bench.workload import Workload
from rollplex.cli.app import run as run_command
from rollplex.cli.bench import bench_gradients
from rollplex.config import load
from rollplex.errors import ConfigError, RollplexError
from rollplex.layout.parameters import gradient_table, parameter_table
from rollplex.layout.shape import read_shape


class Nodes:
    """Leaves gradients of ones, off by `off[name]` of themselves; keeps the nodes in order."""

    def __init__(self, workload: Workload, **off: float) -> None:
        shape = read_shape(workload.config.parent / "model")
        table = gradient_table(parameter_table(shape, dtype="float32", freeze_vision=False))
        self._numbers = table.total_bytes // 4
        self._off = off
        self.nodes: list[Node] = []
        self.fails_at = ""

    @property
    def names(self) -> list[str]:
        return [node.what for node in self.nodes]

    def __call__(self, node: Node) -> Path:
        self.nodes.append(node)
        if node.what == self.fails_at:
            raise RollplexError("the node broke")
        node.run_dir.mkdir(parents=True, exist_ok=True)
        if node.what == "recorded":
            (node.run_dir / "completions.jsonl").write_text("recorded\n")
            return node.run_dir
        (node.run_dir / "gradients").mkdir(exist_ok=True)
        gradient = torch.full((self._numbers,), 1.0 + self._off.get(node.what.replace(" ", "_"), 0.0))
        (node.run_dir / "gradients" / "step_0.bin").write_bytes(gradient.numpy().tobytes())
        return node.run_dir


@pytest.fixture
def wanted(workload: Workload, tmp_path: Path) -> Comparison:
    return Comparison(
        config=workload.config, overrides=["run.seed=3"], responses=None, spread_s=0.5, out=tmp_path / "out"
    )


def _silent(_: str) -> None:
    pass


def test_kernels_are_deterministic_unless_asked_otherwise(
    workload: Workload, wanted: Comparison, tmp_path: Path
) -> None:
    """With others a GPU's serial replays differ from each other by more than the bound."""
    for asked, expected in (((), True), (("run.deterministic=false",), False)):
        nodes = Nodes(workload)
        compare_gradients(
            Comparison(**{**vars(wanted), "overrides": asked, "out": tmp_path / str(expected)}), say=_silent, run=nodes
        )
        assert {load(node.config, node.overrides).run.deterministic for node in nodes.nodes} == {expected}


def test_responses_are_recorded_once_and_replayed_four_times(workload: Workload, wanted: Comparison) -> None:
    nodes = Nodes(workload, overlap=1e-6)
    compared = compare_gradients(wanted, say=_silent, run=nodes)
    assert nodes.names == ["recorded", "serial", "serial again", "overlap", "stream"]
    assert compared.differences["serial again"].whole == 0.0
    assert compared.differences["overlap"].whole == pytest.approx(1e-6, rel=0.1)
    assert compared.exceeded == ()
    recorded, *replays = nodes.nodes
    assert {"run.log_tokens=true", "run.log_completions=2", "run.seed=3"} <= set(recorded.overrides)
    for node, schedule in zip(replays, ("serial", "serial", "overlap", "stream"), strict=True):
        assert f"run.schedule={schedule}" in node.overrides
        assert f"rollout.replay={wanted.out / 'responses.jsonl'}" in node.overrides
        assert {"rollout.engine=replay", "rollout.replay_s=0.5", "optimizer.max_grad_norm=0"} <= set(node.overrides)
        assert node.iterations == 1
    assert not list(wanted.out.rglob("*.bin")), "gradients are large: none stays"


def test_what_the_workload_says_of_evaluations_and_of_schedules_in_turn_is_left_out(
    workload: Workload, wanted: Comparison
) -> None:
    nodes = Nodes(workload)
    overrides = ["run.alternate=[overlap,serial]", 'eval=[{"name": "e", "data": "rows.jsonl"}]']
    compare_gradients(Comparison(**{**vars(wanted), "overrides": overrides}), say=_silent, run=nodes)
    for node, schedule in zip(nodes.nodes[1:], ("serial", "serial", "overlap", "stream"), strict=True):
        config = load(node.config, node.overrides)
        assert config.run.schedule_of(0) == schedule
        assert config.eval == ()


def test_a_comparison_that_was_ended_goes_on_with_the_run_that_is_missing(
    workload: Workload, wanted: Comparison
) -> None:
    first = Nodes(workload)
    first.fails_at = "overlap"
    with pytest.raises(RollplexError, match="the node broke"):
        compare_gradients(wanted, say=_silent, run=first)
    second = Nodes(workload)
    assert compare_gradients(wanted, say=_silent, run=second).whole
    assert second.names == ["overlap", "stream"]
    third = Nodes(workload)
    assert compare_gradients(wanted, say=_silent, run=third).whole
    assert third.names == []


def test_no_more_runs_than_asked_for_are_made_at_a_time(workload: Workload, wanted: Comparison) -> None:
    limited = Comparison(**{**vars(wanted), "limit": 2})
    turns = [Nodes(workload) for _ in range(4)]
    compared = [compare_gradients(limited, say=_silent, run=nodes) for nodes in turns]
    assert [nodes.names for nodes in turns] == [["recorded", "serial"], ["serial again", "overlap"], ["stream"], []]
    assert compared[-1].whole


def test_responses_that_are_there_are_used_whatever_folder_they_are_named_from(
    workload: Workload, wanted: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(workload)
    file = tmp_path / "mine.jsonl"
    file.touch()
    monkeypatch.chdir(tmp_path)
    gpu = ["device.kind=cuda", "rollout.engine=sglang"]  # which would not record in float32, but need not
    other = Comparison(**{**vars(wanted), "responses": Path("mine.jsonl"), "overrides": gpu})
    compare_gradients(other, say=_silent, run=nodes)
    assert "recorded" not in nodes.names
    assert all(f"rollout.replay={file}" in node.overrides for node in nodes.nodes)


def test_the_folder_of_another_configuration_is_refused(workload: Workload, wanted: Comparison) -> None:
    compare_gradients(wanted, say=_silent, run=Nodes(workload))
    other = Comparison(**{**vars(wanted), "overrides": ["model.dtype=float64"]})
    with pytest.raises(ConfigError, match="of another configuration; got model.dtype float32 there, float64 now"):
        compare_gradients(other, say=_silent, run=Nodes(workload))


def _difference(whole: float) -> Difference:
    return Difference(whole=whole, worst=2 * whole, parameter="p", norm=1.0)


@pytest.mark.parametrize(
    ("dtype", "again", "overlap", "exceeded"),
    [
        ("bfloat16", 2e-3, 3.9e-3, ()),
        ("bfloat16", 2e-3, 4.1e-3, ("overlap",)),
        ("bfloat16", 8e-3, 1.1e-2, ("overlap",)),
        ("bfloat16", 2e-2, 1e-3, ("serial again",)),
        ("bfloat16", 0.0, 0.0, ()),
        ("bfloat16", 0.0, 1e-9, ("overlap",)),
        ("float32", 0.0, 9e-6, ()),
        ("float32", 0.0, 1.1e-5, ("overlap",)),
        ("float32", 0.0, float("nan"), ("overlap",)),
    ],
)
def test_a_schedule_may_differ_by_twice_what_two_serial_replays_do_and_never_by_more_than_the_bound(
    dtype: str, again: float, overlap: float, exceeded: tuple[str, ...]
) -> None:
    differences = {"serial again": _difference(again), "overlap": _difference(overlap)}
    compared = Compared(dtype=dtype, command="", differences=differences)
    assert compared.exceeded == exceeded
    assert [row[3] for row in table_of(compared).rows] == ["no" if name in exceeded else "yes" for name in differences]


@pytest.mark.parametrize(("off", "code"), [(0.0, 0), (1e-3, 1)])
def test_the_exit_code_says_whether_a_schedule_is_too_far(
    workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str], off: float, code: int
) -> None:
    assert _command(workload, tmp_path, Nodes(workload, stream=off)) == code
    assert ("1.00e-03" in capsys.readouterr().out) == bool(code)


def test_a_signal_ends_it_with_its_exit_code(
    workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: Node) -> Path:
        error = StoppedError("The bench was stopped")
        error.exit_code = 130
        raise error

    assert _command(workload, tmp_path, stopped) == 130
    assert "goes on" in capsys.readouterr().out


def _command(workload: Workload, tmp_path: Path, run: Callable[[Node], Path]) -> int:
    return bench_gradients(
        workload.config,
        overrides=[],
        responses=None,
        spread_s=0.0,
        limit=0,
        out=tmp_path / "o",
        runs_dir=tmp_path,
        command="rollplex bench gradients",
        run=run,
    )


@pytest.mark.timeout(400)  # five nodes
def test_on_a_host_the_schedules_gradients_are_the_same_bits(
    workload: Workload, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path_factory.mktemp("g") / "o"
    arguments = ["bench", "gradients", str(workload.config), "--spread", "0.4", "--out", str(out)]
    assert run_command(arguments) == 0, (out / "logs").is_dir() and [f.read_text() for f in (out / "logs").iterdir()]
    assert capfd.readouterr().err == ""
    compared = json.loads((out / "gradients.json").read_text())
    assert {name: found["whole"] for name, found in compared["differences"].items()} == {
        "serial again": 0.0,
        "overlap": 0.0,
        "stream": 0.0,
    }
    recorded = [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]
    assert len(recorded) == 2 * 3
    assert all(len(one["ids"]) == len(one["logprobs"]) == one["tokens"] for one in recorded)
    (row,) = [json.loads(line) for line in (out / "runs/stream/metrics.jsonl").read_text().splitlines()]
    assert row["replayed"] == 1.0
    assert "REPLAYED" in (out / "logs/stream.log").read_text()
