"""Placements beside each other, with a fake instead of nodes: order, going on, what the table says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollplex.bench.nodes import Job, StoppedError
from rollplex.bench.placement import parse_placements
from rollplex.bench.placements import Wanted, notes, run_placements, table_of
from rollplex.bench.rows import Row
from rollplex.bench.workload import Workload
from rollplex.cli.bench_devices import bench_placements
from rollplex.config import load
from rollplex.errors import ConfigError

MakeRow = Callable[..., Row]


class Nodes:
    """Invents rows: apart they take twice as long, and the second device is idle for most of the time."""

    def __init__(self, row: MakeRow) -> None:
        self._row = row
        self.jobs: list[Job] = []

    @property
    def names(self) -> list[str]:
        return [f"{job.repeat} {job.run_dir.parents[1].name} {job.mode.schedule}" for job in self.jobs]

    def one(self, job: Job) -> Row:
        self.jobs.append(job)
        whole = (4.0 if "+" in str(job.run_dir) else 2.0) - (0.5 if job.mode.schedule == "overlap" else 0.0)
        row = self._row(job.mode.schedule, job.mode.prefix, job.repeat, iteration=whole)
        row.median_s.update({"publish": 0.02, "idle/0:0": 0.5, "idle/0:1": whole * 0.75})
        return row

    def several(self, jobs: Sequence[Job]) -> list[Row]:
        return [self.one(job) for job in jobs]

    @property
    def given(self) -> dict[str, Any]:
        return {"run": self.one, "run_all": self.several}


@pytest.fixture
def nodes(row: MakeRow) -> Nodes:
    return Nodes(row)


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path, because run directories hold sockets."""
    return tmp_path_factory.mktemp("p")


@pytest.fixture
def wanted(workload: Workload, short: Path) -> Wanted:
    return Wanted(
        config=workload.config,
        overrides=["run.seed=3"],
        placements=parse_placements("2x1/1x2,1x1+1x1"),
        schedules=["serial", "overlap"],
        repeats=2,
        iterations=4,
        warmup=1,
        out=short,
    )


def test_placements_take_turns_repeat_by_repeat_and_are_what_their_names_say(wanted: Wanted, nodes: Nodes) -> None:
    run_placements(wanted, say=print, **nodes.given)
    assert nodes.names == [
        *("0 2x1-1x2 serial", "0 2x1-1x2 overlap", "0 1x1+1x1 serial", "0 1x1+1x1 overlap"),
        *("1 1x1+1x1 overlap", "1 1x1+1x1 serial", "1 2x1-1x2 overlap", "1 2x1-1x2 serial"),
    ]
    together, apart = (load(nodes.jobs[number].config, list(nodes.jobs[number].overrides)) for number in (0, 2))
    assert (together.parallel.training, together.parallel.rollout_devices, together.run.seed) == (2, 0, 3)
    assert (apart.parallel.training, apart.parallel.rollout_devices) == (1, 1)


def test_the_same_command_goes_on_with_the_rows_that_are_missing(wanted: Wanted, row: MakeRow) -> None:
    limited = replace(wanted, limit=3)
    turns = [Nodes(row) for _ in range(3)]
    missing = [run_placements(limited, say=print, **nodes.given).missing for nodes in turns]
    assert [len(nodes.jobs) for nodes in turns] == [3, 3, 2]
    assert missing == [5, 2, 0]
    assert len({name for nodes in turns for name in nodes.names}) == 8


def test_the_table_has_idle_time_of_each_device_and_gains_over_devices_apart(wanted: Wanted, nodes: Nodes) -> None:
    placed = run_placements(wanted, say=print, **nodes.given)
    table = table_of(placed)
    assert [line[:3] for line in table.rows] == [
        *(("2x1/1x2", "serial", "2.00"), ("2x1/1x2", "overlap", "1.50")),
        *(("1x1+1x1", "serial", "4.00"), ("1x1+1x1", "overlap", "3.50")),
    ]
    assert table.head[9:] == (
        *("idle s of device 0", "idle s of device 1", "% of device 0", "% of device 1"),
        *("over the same apart", "over the fastest apart"),
    )
    assert table.rows[0][8:] == ("20.0", "0.500", "1.50", "25%", "75%", "2.00x", "1.75x")
    told = "\n".join(notes(placed))
    assert "Fastest colocated (2x1/1x2, overlap) over fastest apart (overlap): 2.33x. The paper gives 1.57x" in told
    assert "WARNING" not in told


def test_keys_that_a_placement_sets_are_refused(wanted: Wanted, nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match=r"sets this key itself.*parallel\.devices=4"):
        run_placements(replace(wanted, overrides=["parallel.devices=4"]), say=print, **nodes.given)
    assert not nodes.jobs


def command(workload: Workload, out: Path, nodes: Nodes, **changes: Any) -> int:
    given: dict[str, Any] = {"overrides": [], "placements": "2x1/1x2,1x1+1x1", "modes": "serial", "together": True}
    given |= {"repeats": 1, "iterations": 2, "warmup": 1, "limit": 0, "out": out, "runs_dir": out, "markdown": True}
    return bench_placements(workload.config, command="rollplex bench placements", **given | nodes.given | changes)


def test_the_command_prints_a_line_for_each_placement(
    workload: Workload, short: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(workload, short, nodes) == 0
    printed = capsys.readouterr().out
    assert "| 1x1+1x1 | serial | 4.00 | one |" in printed
    assert "how much it differs from run to run is not known" in printed


def test_a_signal_ends_the_command_with_its_code(workload: Workload, short: Path, nodes: Nodes) -> None:
    def stop(_: Job) -> Row:
        stopped = StoppedError("The bench was stopped")
        stopped.exit_code = 130
        raise stopped

    assert command(workload, short, nodes, run=stop) == 130
