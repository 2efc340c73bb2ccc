"""Tuning as a whole, with rows that are made up: which are measured, in which order, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollplex.bench import schedules
from rollplex.bench.lengths import Lengths
from rollplex.bench.machine import Machine, Software
from rollplex.bench.nodes import Job, StoppedError
from rollplex.bench.rows import Row
from rollplex.bench.workload import Wanted as WorkloadWanted
from rollplex.bench.workload import Workload, write_workload
from rollplex.cli.tune import run_tune_share
from rollplex.config import load
from rollplex.errors import ConfigError, RollplexError
from rollplex.tune.share import Sharing, Tuned

ROLLOUT_S = {"1:1": 7.8, "turns": 8.1, "0.64:0.36": 6.6, "0.7:1": 7.4}
TEXTS = "turns,0.64:0.36,0.7:1"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    lengths = Lengths(shortest=3, longest=9)
    folder = tmp_path_factory.mktemp("w")
    return write_workload(
        folder,
        WorkloadWanted(vision_tokens=6, text_tokens=11, lengths=lengths, group_size=3, prompts=2, preset="tiny"),
    )


@pytest.fixture(autouse=True)
def _no_edits_of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of rows refuses rows of other changes; a checkout that is edited during the tests is none of theirs."""
    software = Software(rollplex="0.1.0", python="3.11.7", packages={"torch": "2.13.0"}, commit="b" * 40)
    monkeypatch.setattr("rollplex.bench.schedules.read_software", lambda: software)


class Tuning:
    """One `rollplex tune share`; rows are invented."""

    def __init__(self, config: Path, out: Path) -> None:
        self.config, self.out = config, out
        self.names: list[str] = []
        self.sharing: Sharing = ("mps", "")
        self.fail_at: int | None = None
        self.error: RollplexError = RollplexError("the node broke")

    def run(self, **changes: Any) -> int:
        given: dict[str, Any] = {
            "overrides": ["device.kind=cuda", "device.gpu=1"],
            "candidates": TEXTS,
            "repeats": 2,
            "iterations": 3,
            "warmup": 1,
            "out": self.out,
            "runs_dir": self.out,
            "only": 0,
            "dry_run": False,
            "command": "rollplex tune share",
            "run": self._row,
            "sharing": lambda _: self.sharing,
        }
        return run_tune_share(self.config, **{**given, **changes})

    @property
    def result(self) -> Tuned:
        return msgspec.json.decode((self.out / "share.json").read_bytes(), type=Tuned)

    def _row(self, job: Job) -> Row:
        if len(self.names) == self.fail_at:
            self.fail_at = None
            raise self.error
        device = load(self.config, [*job.overrides]).device
        text = "turns" if device.sharing == "turns" else f"{device.prefix_share:g}:{device.decode_share:g}"
        serial = job.mode.schedule == "serial"
        self.names.append(f"{job.repeat} {'alone' if serial else text}")
        seconds = dict.fromkeys(
            ("rollout", "score", "train", "update", "other", "prefix_hidden", "prefix_backward"), 1.0
        )
        seconds |= {"score_units": 1.0, "suffix_units": 1.0, "iteration": 20.0, "prefix_forward": 2.0, "window": 8.0}
        seconds["generate"] = 6.0 if serial else ROLLOUT_S[text]
        values: dict[str, Any] = {
            "repeat": job.repeat,
            "schedule": job.mode.schedule,
            "prefix": job.mode.prefix,
            "started": "2026-11-29T10:00:00Z",
            "wall_s": 1.0,
            "iteration_s": (20.0, 20.0),
            "median_s": seconds,
            "hidden_share": 0.0 if serial else 1.0,
            "work_hidden": 0.0 if serial else 1.0,
            "prompt_tokens": 17.0,
            "response_tokens": 6.0,
            "prompts": 2,
            "digest": "weights",
        }
        return Row(**values)


@pytest.fixture
def tuning(made: Workload, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Tuning:
    machine = Machine(cpu="AMD EPYC", cores=2, memory_bytes=24 * 2**30, system="Debian 12, Linux 6.1")
    monkeypatch.setattr(schedules, "read_machine", lambda *_: machine)  # there is no GPU to be described
    folder = tmp_path_factory.mktemp("t")
    config = made.config.with_name(f"{folder.name}.yaml")  # beside the data that it names
    config.write_text(made.config.read_text() + "# the end\n")
    return Tuning(config, folder / "o")


def test_every_candidate_is_measured_in_every_repeat_and_the_best_is_written(
    tuning: Tuning, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tuning.config.read_text()
    assert tuning.run() == 0
    each = ["alone", "1:1", "turns", "0.64:0.36", "0.7:1"]
    assert tuning.names == [f"{repeat} {name}" for repeat in (0, 1) for name in each]
    after = tuning.config.read_text()
    device = load(tuning.config, ["device.kind=cuda"]).device
    assert (device.prefix_share, device.decode_share) == (0.64, 0.36)
    assert set(before.splitlines()) <= set(after.splitlines()), "all else stays"
    assert tuning.config.with_suffix(".share.json").read_bytes() == (tuning.out / "share.json").read_bytes()
    told = capsys.readouterr().out
    assert "window ratio 1.212" in told
    assert "warning" not in told


def test_a_dry_run_leaves_the_configuration(tuning: Tuning) -> None:
    before = tuning.config.read_text()
    assert tuning.run(dry_run=True) == 0
    assert tuning.config.read_text() == before
    assert not tuning.config.with_suffix(".share.json").exists()
    assert tuning.result.choice.taken.prefix_share == 0.64


def test_the_same_command_goes_on_where_it_was_interrupted(tuning: Tuning, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = StoppedError("The bench was stopped")
    stopped.exit_code = 130
    tuning.fail_at, tuning.error = 7, stopped
    assert tuning.run() == 130
    assert str(tuning.out) in capsys.readouterr().out
    assert tuning.run() == 0
    assert len(tuning.names) == len(set(tuning.names)) == 10


def test_rows_can_be_measured_a_few_at_a_time(tuning: Tuning) -> None:
    before = tuning.config.read_text()
    for measured in (4, 8):
        assert tuning.run(only=4) == 0
        assert len(tuning.names) == measured
        assert tuning.config.read_text() == before
    assert tuning.run(only=4) == 0
    assert len(set(tuning.names)) == 10
    assert tuning.config.read_text() != before


def test_without_mps_nothing_more_is_measured_and_a_warning_says_why(
    tuning: Tuning, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning.sharing = ("turns", "no daemon")
    assert tuning.run(repeats=1) == 0
    assert tuning.names == ["0 alone", "0 1:1"]
    assert "take turns on this GPU, so that no share helps: no daemon" in capsys.readouterr().out
    device = load(tuning.config, ["device.kind=cuda"]).device
    assert (device.prefix_share, device.decode_share) == (1.0, 1.0)


def test_a_row_that_fails_ends_it_and_what_is_measured_stays(tuning: Tuning) -> None:
    tuning.fail_at = 3
    with pytest.raises(RollplexError, match="the node broke"):
        tuning.run(repeats=1)
    assert tuning.run(repeats=1) == 0
    assert len(tuning.names) == len(set(tuning.names)) == 5


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"overrides": []}, "device.kind: host"),
        ({"overrides": ["device.kind=cuda", "device.prefix_share=0.5"]}, "--candidates"),
        ({"candidates": "half"}, "--candidates"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_runs(
    tuning: Tuning, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        tuning.run(**changes)
    assert tuning.names == []


def test_a_configuration_that_cannot_be_written_is_refused_before_anything_runs(tuning: Tuning) -> None:
    lines = [line for line in tuning.config.read_text().splitlines() if not line.startswith("device")]
    tuning.config.write_text("\n".join([*lines, "device:", ""]))
    with pytest.raises(ConfigError):
        tuning.run()
    assert tuning.names == []
