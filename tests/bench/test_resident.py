"""Resident memory of a run's processes, and what samples of it say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.bench.resident import Sample, growth, resident
from rollplex.errors import DataError


def _process(root: Path, pid: int, parent: int, module: str, pages: int) -> None:
    entry = root / "proc" / str(pid)
    entry.mkdir(parents=True)
    (entry / "stat").write_text(f"{pid} (a name) with ) S {parent} 1 1")
    (entry / "cmdline").write_bytes(b"\0".join((b"python", b"-m", module.encode(), b"--run-dir", b"r")))
    (entry / "statm").write_text(f"1000 {pages} 1 1 0 1 0")


def test_only_the_runs_own_processes_are_counted_and_those_of_one_name_together(tmp_path: Path) -> None:
    _process(tmp_path, 10, 1, "rollplex_coordinator", 5)
    _process(tmp_path, 11, 10, "rollplex_trainer", 100)
    _process(tmp_path, 12, 10, "rollplex.rewards", 20)
    _process(tmp_path, 13, 12, "rollplex.rewards.runner", 30)
    _process(tmp_path, 14, 12, "rollplex.rewards.runner", 40)
    _process(tmp_path, 15, 10, "something.else", 9)
    _process(tmp_path, 20, 1, "rollplex_trainer", 7)
    (tmp_path / "proc/self").mkdir()
    assert {name: size // 4096 for name, size in resident(10, tmp_path).items()} == {
        "trainer": 100,
        "reward": 20,
        "reward functions": 70,
    }
    assert resident(99, tmp_path) == {}


def _samples(sizes: dict[str, list[int]], per_epoch: int) -> list[Sample]:
    count = len(next(iter(sizes.values())))
    return [
        Sample(
            at_s=float(n),
            iterations=n * 3 * per_epoch // (count - 1),
            bytes={name: values[n] for name, values in sizes.items()},
        )
        for n in range(count)
    ]


def test_growth_is_from_the_end_of_the_first_epoch_to_the_end_of_the_last() -> None:
    steady = [100] * 31
    steady[:9] = range(9)  # the first epoch fills caches
    growing = [1000 + 10 * n for n in range(31)]
    found = {one.process: one for one in growth(_samples({"steady": steady, "growing": growing}, 100), 100.0, 3)}
    assert found["steady"].relative == 0.0
    assert found["growing"].epochs == (1095.0, 1195.0, 1295.0)
    assert found["growing"].relative == pytest.approx(200 / 1095)


def test_a_last_look_at_a_run_that_is_ending_takes_no_process_off_the_list() -> None:
    samples = _samples({"coordinator": [10] * 31, "trainer": [100] * 31}, 100)
    ending = Sample(at_s=31.0, iterations=300, bytes={"coordinator": 10})
    assert [one.process for one in growth([*samples, ending], 100.0, 3)] == ["coordinator", "trainer"]


def test_an_epoch_without_samples_at_its_end_is_an_error() -> None:
    with pytest.raises(DataError, match=r"2 samples, none between iterations 90 and 100"):
        growth(_samples({"a": [1, 2]}, 100), 100.0, 3)
