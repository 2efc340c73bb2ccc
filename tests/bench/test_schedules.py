"""The bench as a whole, with a fake instead of nodes: order, resuming, refusals, exit codes; and once with nodes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollplex.bench.nodes import FIXED, Job, StoppedError
from rollplex.bench.report import report
from rollplex.bench.result import Result
from rollplex.bench.rows import Row, choose_modes, practised
from rollplex.bench.schedules import Plan, run_schedules
from rollplex.bench.workload import Workload
from rollplex.cli.app import run as run_command
from rollplex.cli.bench import bench_schedules
from rollplex.config import load
from rollplex.errors import ConfigError, RollplexError

MakeRow = Callable[..., Row]
SIX = choose_modes("serial,overlap,stream", "shared,replicated")


class Nodes:
    """Measures rows by inventing them; keeps the jobs in order. Fails at job `fail_at`, from 0, with `error`."""

    def __init__(self, row: MakeRow, **given: Any) -> None:
        self.jobs: list[Job] = []
        self.fail_at: int | None = None
        self.error: RollplexError = RollplexError("the node broke")
        self._row = row
        self._given = given

    @property
    def names(self) -> list[str]:
        return [f"{job.repeat} {job.mode.name}" for job in self.jobs]

    def __call__(self, job: Job) -> Row:
        self.jobs.append(job)
        if len(self.jobs) - 1 == self.fail_at:
            raise self.error
        return self._row(job.mode.schedule, job.mode.prefix, job.repeat, **self._given)


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path, because run directories hold sockets."""
    return tmp_path_factory.mktemp("b")


@pytest.fixture
def plan(workload: Workload, short: Path) -> Plan:
    return Plan(
        config=workload.config,
        overrides=["run.seed=3"],
        modes=SIX,
        repeats=2,
        iterations=4,
        warmup=1,
        out=short / "b",
        command="rollplex bench",
    )


def _silent(_: str) -> None:
    pass


def test_what_modes_differ_in_is_theirs_whatever_the_workload_says(plan: Plan, row: MakeRow) -> None:
    """A row of overlap that ran serial every second iteration would look like one that gains little."""
    text = plan.config.read_text()
    folder = shutil.copytree(plan.config.parent, plan.out.parent / "w")  # the workload is other tests' too
    config = folder / "other.yaml"
    config.write_text(text.replace("run:\n", "run:\n  alternate: [serial, overlap]\n"))
    assert load(config, []).run.alternate
    nodes = Nodes(row)
    run_schedules(replace(plan, config=config, repeats=1), say=_silent, run=nodes)
    for job in nodes.jobs:
        found = load(job.config, [*job.overrides, *FIXED, *job.mode.overrides])
        assert {found.run.schedule_of(step) for step in range(4)} == {job.mode.schedule}
        assert not found.rollout.sglang.own_weights


def test_every_mode_is_run_in_every_repeat_repeat_by_repeat(plan: Plan, row: MakeRow) -> None:
    nodes = Nodes(row)
    result = run_schedules(plan, say=_silent, run=nodes)
    assert [name[0] for name in nodes.names] == ["0"] * 6 + ["1"] * 6
    assert len(set(nodes.names)) == 12
    assert nodes.names[5][2:] == nodes.names[6][2:] == "stream replicated"
    assert [mode.mode for mode in result.modes] == list(SIX)
    job = nodes.jobs[0]
    assert (job.iterations, job.warmup, list(job.overrides)) == (4, 1, ["run.seed=3"])
    assert len({job.run_dir for job in nodes.jobs}) == 12


def test_the_result_is_kept_beside_the_rows(plan: Plan, row: MakeRow, workload: Workload) -> None:
    result = run_schedules(plan, say=_silent, run=Nodes(row))
    kept = msgspec.json.decode((plan.out / "result.json").read_bytes(), type=Result)
    assert kept == result
    assert kept.facts.prompt_tokens == workload.prompt_tokens
    assert kept.made.config["run"]["seed"] == 3  # type: ignore[index]
    assert kept.command == "rollplex bench"
    rows = [json.loads(line) for line in (plan.out / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 12


def test_a_failed_row_ends_the_bench_and_a_second_call_goes_on_with_it(plan: Plan, row: MakeRow) -> None:
    first = Nodes(row)
    first.fail_at = 4
    with pytest.raises(RollplexError, match="the node broke"):
        run_schedules(plan, say=_silent, run=first)
    assert not (plan.out / "result.json").exists()
    second, said = Nodes(row), list[str]()
    result = run_schedules(plan, say=said.append, run=second)
    assert second.names[0] == first.names[4]
    assert len(second.names) == 12 - 4
    assert said[0] == "4 of 12 rows are there already"
    assert said[1].startswith("row 5/12  ")
    assert all(mode.seconds["iteration"].count == 2 for mode in result.modes)


def test_a_complete_bench_is_summed_up_again_without_running_anything(plan: Plan, row: MakeRow) -> None:
    result = run_schedules(plan, say=_silent, run=Nodes(row))
    nodes = Nodes(row)
    assert run_schedules(plan, say=_silent, run=nodes) == result
    assert nodes.jobs == []


def test_so_many_rows_are_measured_at_a_time_and_the_next_call_goes_on(plan: Plan, row: MakeRow) -> None:
    limited = replace(plan, limit=5)
    nodes, said = [Nodes(row) for _ in range(3)], list[str]()
    results = [run_schedules(limited, say=said.append, run=one) for one in nodes]
    assert [len(one.jobs) for one in nodes] == [5, 5, 2]
    assert [result.missing for result in results] == [7, 2, 0]
    assert "7 of 12 rows are left; the same command goes on" in said
    assert results[-1] == run_schedules(plan, say=_silent, run=Nodes(row))


def test_modes_of_one_kind_of_prefix_can_take_turns_in_one_node(plan: Plan, row: MakeRow) -> None:
    taken: list[list[Job]] = []

    def together(jobs: Sequence[Job]) -> list[Row]:
        taken.append(list(jobs))
        return [row(job.mode.schedule, job.mode.prefix, job.repeat, digest="") for job in jobs]

    alone = Nodes(row)
    wanted = replace(plan, together=True, repeats=1, limit=4)
    result = run_schedules(wanted, say=_silent, run=alone, run_all=together)
    assert result.missing == 2
    result = run_schedules(replace(wanted, limit=0), say=_silent, run=alone, run_all=together)
    assert [[job.mode.text for job in jobs] for jobs in taken] == [
        ["serial:shared", "overlap:shared"],
        ["serial:replicated", "overlap:replicated"],
    ]
    assert alone.names == ["0 stream shared", "0 stream replicated"]
    assert result.missing == 0
    assert "took turns in one node" in " ".join(" ".join(report(result)).split())


def test_a_row_as_practised_has_a_node_to_itself(plan: Plan, row: MakeRow) -> None:
    assert practised().together == ""
    assert [mode.together for mode in SIX[:2]] == ["shared", "replicated"]


def test_rows_with_replicated_prefixes_may_have_fewer_prompts_with_about_the_same_lengths(
    plan: Plan, row: MakeRow, workload: Workload
) -> None:
    nodes = Nodes(row)
    run_schedules(replace(plan, replicated_prompts=1), say=_silent, run=nodes)
    configs = {job.mode.name: load(job.config, [*job.overrides, *job.mode.overrides]) for job in nodes.jobs}
    assert {name: config.data.prompts_per_iteration for name, config in configs.items()} == {
        mode.name: 1 if mode.prefix == "replicated" else 2 for mode in SIX
    }
    few, all_of_them = configs["serial replicated"].rollout.forced_lengths, workload.lengths.of(6)
    assert len(few) == 3
    assert set(few) <= set(all_of_them)
    assert configs["serial shared"].rollout.forced_lengths == all_of_them


def test_more_repeats_or_fewer_modes_go_on_with_the_same_rows(plan: Plan, row: MakeRow) -> None:
    run_schedules(plan, say=_silent, run=Nodes(row))
    more = Nodes(row)
    run_schedules(_changed(plan, repeats=3), say=_silent, run=more)
    assert {job.repeat for job in more.jobs} == {2}
    none = Nodes(row)
    result = run_schedules(_changed(plan, repeats=1, modes=SIX[:2]), say=_silent, run=none)
    assert none.jobs == []
    assert [(mode.mode.name, mode.seconds["iteration"].count) for mode in result.modes] == [
        ("serial shared", 1),
        ("serial replicated", 1),
    ]


def test_rows_of_other_iterations_or_another_configuration_are_refused_before_anything_runs(
    plan: Plan, row: MakeRow
) -> None:
    run_schedules(_changed(plan, repeats=1), say=_silent, run=Nodes(row))
    for change, told in (
        ({"iterations": 5}, "iterations: 4 there, 5 now"),
        ({"overrides": ["run.seed=4"]}, "config.run.seed: 3 there, 4 now"),
    ):
        nodes = Nodes(row)
        with pytest.raises(ConfigError, match=told):
            run_schedules(_changed(plan, **change), say=_silent, run=nodes)
        assert nodes.jobs == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"warmup": 4}, "leaves no iteration"),
        ({"overrides": ["run.schedule=serial"]}, "--modes and --prefixes"),
        ({"overrides": ["run.share_prefix=false"]}, "--modes and --prefixes"),
        ({"overrides": ["run.sched=serial"]}, "Did you mean"),
        ({"overrides": ["algorithm.scale_rewards=batch"]}, "stream"),
        ({"overrides": ["data.prompts_per_iteration=9"]}, "more rows than the dataset has"),
        ({"out": Path("/tmp") / ("x" * 100)}, "too long for a unix socket"),  # noqa: S108 - nothing is written there
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(
    plan: Plan, row: MakeRow, change: dict[str, Any], told: str
) -> None:
    nodes = Nodes(row)
    with pytest.raises(ConfigError, match=told):
        run_schedules(_changed(plan, **change), say=_silent, run=nodes)
    assert nodes.jobs == []
    assert not plan.out.exists()


def _changed(plan: Plan, **changes: Any) -> Plan:
    return Plan(**{**vars(plan), **changes})


@pytest.fixture
def bench(workload: Workload, short: Path) -> Callable[..., int]:
    """bench(nodes, …): the exit code of `rollplex bench schedules` with these nodes."""

    def make(nodes: Nodes, **changes: Any) -> int:
        given: dict[str, Any] = {
            "overrides": [],
            "modes": "serial,overlap",
            "prefixes": "shared",
            "repeats": 1,
            "iterations": 2,
            "warmup": 1,
            "out": short / "b",
            "runs_dir": short / "runs",
            "plot": None,
            "markdown": False,
            "command": "rollplex bench",
        }
        return bench_schedules(workload.config, **{**given, **changes}, run=nodes)

    return make


def test_the_command_prints_the_result_and_where_it_is_kept(
    bench: Callable[..., int], row: MakeRow, capsys: pytest.CaptureFixture[str], short: Path
) -> None:
    assert bench(Nodes(row), plot=short / "p.svg") == 0
    out = capsys.readouterr().out
    assert "overlap alone, prefixes shared" in out
    assert f"kept in {short / 'b/result.json'}" in out
    assert (short / "p.svg").read_text().startswith("<?xml")


def test_without_a_folder_the_bench_makes_one_among_the_runs(
    bench: Callable[..., int], row: MakeRow, short: Path
) -> None:
    assert bench(Nodes(row), out=None) == 0
    (folder,) = (short / "runs").iterdir()
    assert folder.name.startswith("bench-")
    assert (folder / "result.json").exists()


def test_schedules_that_end_with_different_weights_fail_the_bench(
    bench: Callable[..., int], row: MakeRow, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(job: Job) -> Row:
        return row(job.mode.schedule, job.mode.prefix, job.repeat, digest=job.mode.schedule)

    assert bench(run) == 1
    assert "ERROR: weights differ in the end" in capsys.readouterr().out


@pytest.mark.parametrize("code", [130, 0])
def test_a_bench_that_is_stopped_says_how_to_go_on_and_ends_as_the_signal_has_it(
    bench: Callable[..., int], row: MakeRow, capsys: pytest.CaptureFixture[str], short: Path, code: int
) -> None:
    nodes = Nodes(row)
    stopped = StoppedError("The bench was stopped")
    stopped.exit_code = code
    nodes.fail_at, nodes.error = 1, stopped
    assert bench(nodes) == code
    assert f"--out {short / 'b'} goes on" in capsys.readouterr().out
    assert len((short / "b/rows.jsonl").read_text().splitlines()) == 1


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_runs(
    bench: Callable[..., int], row: MakeRow, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(row)
    for plot, told in ((short / "p.pdf", "svg"), (short / "none/p.svg", "folder")):
        with pytest.raises(ConfigError, match=told):
            bench(nodes, plot=plot)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollplex\[bench\]'"):
        bench(nodes, plot=short / "p.svg")
    assert nodes.jobs == []


@pytest.mark.timeout(240)
def test_two_real_modes_run_end_with_the_same_weights_and_are_told_apart(
    workload: Workload, short: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = short / "b"
    arguments = ["--repeats", "1", "--iterations", "2", "--modes", "serial,overlap", "--prefixes", "shared"]
    assert run_command(["bench", "schedules", str(workload.config), *arguments, "--out", str(out), "--markdown"]) == 0
    captured = capfd.readouterr()
    assert "| serial shared |" in captured.out
    assert "Exact: serial and overlap ended with the same weights" in " ".join(captured.out.split())
    assert captured.err == ""
    result = msgspec.json.decode((out / "result.json").read_bytes(), type=Result)
    serial, overlap = result.modes
    assert serial.digests == overlap.digests
    assert serial.hidden_share.median == 0.0
    for schedule in ("serial", "overlap"):
        config = load(out / f"runs/1-{schedule}-shared/config.yaml").run
        assert (config.schedule, config.share_prefix) == (schedule, True)
    assert serial.response_tokens == pytest.approx(6.0)
    assert "decode" in serial.seconds
    metrics = json.loads((out / "runs/1-overlap-shared/metrics.jsonl").read_text().splitlines()[-1])
    assert overlap.hidden_share.median == pytest.approx(metrics["time/prefix_in_window"])
    assert overlap.seconds["iteration"].median == metrics["time/step_s"]
    assert list(out.rglob("checkpoints")) == []


def test_two_modes_take_turns_in_a_real_node(
    workload: Workload, short: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = short / "t"
    arguments = ["--repeats", "1", "--iterations", "2", "--rows", "overlap:shared,serial:shared", "--together"]
    for key, value in (("rollout.max_new_tokens", 80), ("rollout.forced_lengths", [80] * 6)):
        arguments += ["--set", f"{key}={value}"]  # long enough for all prefixes to meet the window on a busy machine
    assert run_command(["bench", "schedules", str(workload.config), *arguments, "--out", str(out)]) == 0
    assert capfd.readouterr().err == ""
    result = msgspec.json.decode((out / "result.json").read_bytes(), type=Result)
    overlap, serial = result.modes
    assert (overlap.schedule, serial.schedule) == ("overlap", "serial")
    (run_dir,) = (out / "runs").glob("1-*")
    config = load(run_dir / "config.yaml").run
    assert config.alternate == ("overlap", "serial")
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert overlap.seconds["iteration"].median == metrics[2]["time/step_s"]
    assert serial.seconds["iteration"].median == metrics[3]["time/step_s"]
    assert serial.hidden_share.median == 0.0 < overlap.hidden_share.median
    assert overlap.hidden_share.median == metrics[2]["time/prefix_in_window"]
    (window,) = result.windows
    assert window.ratio > 0.0
