"""The bench's folder: what it keeps, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollplex.bench.folder import BenchFolder, Made, differences
from rollplex.bench.rows import Row
from rollplex.errors import ConfigError, DataError

MakeRow = Callable[..., Row]


def _with(made: Made, **changes: object) -> Made:
    return msgspec.structs.replace(made, **changes)


def test_rows_are_there_again_when_the_folder_is_opened_again(tmp_path: Path, made: Made, row: MakeRow) -> None:
    first, second = row("serial", "shared"), row("overlap", "shared", 1)
    with BenchFolder(tmp_path / "b", made) as folder:
        assert folder.rows == []
        folder.append(first)
        folder.append(second)
    with BenchFolder(tmp_path / "b", made) as folder:
        assert folder.rows == [first, second]
        assert folder.row(second.mode, 1) == second
        assert folder.row(second.mode, 0) is None


def test_rows_of_another_machine_are_refused_with_what_differs(tmp_path: Path, made: Made, row: MakeRow) -> None:
    with BenchFolder(tmp_path, made) as folder:
        folder.append(row("serial", "shared"))
    other = _with(made, machine=msgspec.structs.replace(made.machine, cores=64))
    with pytest.raises(ConfigError, match=r"machine\.cores: 2 there, 64 now"):
        BenchFolder(tmp_path, other)
    assert len(BenchFolder(tmp_path, made).rows) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"iterations": 9}, "iterations: 4 there, 9 now"),
        ({"warmup": 0}, "warmup: 1 there, 0 now"),
        ({"data": "x"}, "data: 'd' there, 'x' now"),
        ({"model": "x"}, "model: 'm' there, 'x' now"),
        (
            {"config": {"run": {"seed": 1, "threads": 1}, "model": {"dtype": "float32"}}},
            "config.run.seed: 0 there, 1 now",
        ),
    ],
)
def test_each_thing_that_rows_have_in_common_is_compared(made: Made, change: dict[str, object], told: str) -> None:
    assert differences(made, _with(made, **change)) == [told]


def test_another_commit_or_changes_to_it_are_another_bench(made: Made) -> None:
    for change in (
        {"commit": "b" * 40},
        {"changes": "12"},
        {"packages": {"torch": "2.14.0", "transformers": "5.24.0"}},
    ):
        (told,) = differences(made, _with(made, software=msgspec.structs.replace(made.software, **change)))
        assert told.startswith(f"software.{next(iter(change))}")


def test_nothing_differs_after_a_round_through_the_file(tmp_path: Path, made: Made) -> None:
    BenchFolder(tmp_path, made).close()
    there = msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Made)
    assert differences(there, made) == []


def test_a_row_cut_short_is_taken_off_and_measured_again(tmp_path: Path, made: Made, row: MakeRow) -> None:
    with BenchFolder(tmp_path, made) as folder:
        folder.append(row("serial", "shared"))
    file = tmp_path / "rows.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:50])
    with BenchFolder(tmp_path, made) as folder:
        assert len(folder.rows) == 1
        folder.append(row("overlap", "shared"))
    assert len(file.read_bytes().splitlines()) == 2
    with BenchFolder(tmp_path, made) as folder:
        assert [one.schedule for one in folder.rows] == ["serial", "overlap"]


def test_a_damaged_row_is_an_error_with_its_line(tmp_path: Path, made: Made, row: MakeRow) -> None:
    with BenchFolder(tmp_path, made) as folder:
        folder.append(row("serial", "shared"))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError) as caught:
        BenchFolder(tmp_path, made)
    assert caught.value.where.endswith("rows.jsonl:2")


def test_one_bench_at_a_time_has_the_folder(tmp_path: Path, made: Made) -> None:
    with BenchFolder(tmp_path, made), pytest.raises(ConfigError, match="Another bench is running"):
        BenchFolder(tmp_path, made)
    BenchFolder(tmp_path, made).close()


def test_rows_without_what_they_were_made_with_are_refused(tmp_path: Path, made: Made) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"needed bench\.json"):
        BenchFolder(tmp_path, made)
    (tmp_path / "bench.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a bench's"):
        BenchFolder(tmp_path, made)
