"""A GPU's memory against the books, from a journal written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.bench.hbm import read_hbm, table
from rollplex.cli.app import run
from rollplex.errors import DataError
from rollplex.journal.events import DeviceReady, Event, MemoryObserved
from rollplex.protocol.common import Device
from rollplex_coordinator.records.journal import Journal

GPU = Device(node=0, index=0)
TOTAL = 1000 * 2**30


def ready() -> DeviceReady:
    return DeviceReady(
        device=GPU,
        gpu=0,
        uuid="GPU-1",
        name="NVIDIA H200",
        driver="580",
        total_bytes=TOTAL,
        free_bytes=TOTAL,
        sharing_asked="mps",
        sharing_used="mps",
    )


def seen(phase: str, step: int | None, used: int, difference: int = 0) -> MemoryObserved:
    """In GiB."""
    return MemoryObserved(
        device=GPU,
        phase=phase,
        used_bytes=used * 2**30,
        segments_bytes=0,
        overhead_bytes=3 * 2**30,
        difference_bytes=difference * 2**30,
        step=step,
    )


def write(folder: Path, *events: Event) -> Path:
    journal = Journal(folder / "journal.sqlite")
    for event in events:
        journal.append(event)
    journal.close()
    return folder


def test_peaks_are_told_by_phase_over_the_iterations_that_count(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        ready(),
        seen("LOAD", None, 500),
        seen("ROLLOUT", 0, 400, 300),
        seen("ROLLOUT", 1, 100, -4),
        seen("TRAIN", 1, 50),
        seen("ROLLOUT", 2, 90),
        seen("ROLLOUT", 2, 103, 2),
    )
    hbm = read_hbm(folder, warmup=1)
    rollout, train = hbm.phases
    assert (rollout.phase, rollout.iterations) == ("ROLLOUT", 2)
    sizes = (rollout.first_bytes, rollout.last_bytes, rollout.most_bytes, rollout.books_bytes, rollout.difference_bytes)
    assert [size / 2**30 for size in sizes] == [100, 103, 103, 101, -4]
    assert (train.phase, train.most_bytes) == ("TRAIN", 50 * 2**30)
    assert (hbm.gpu, hbm.overhead_bytes) == ("NVIDIA H200", 3 * 2**30)
    assert hbm.within
    assert table(hbm).rows[0] == ("ROLLOUT", "2", "100.00", "103.00", "103.00", "101.00", "-4.00", "-0.40%")


@pytest.mark.parametrize(
    ("later", "code"),
    [(seen("ROLLOUT", 2, 119), 0), (seen("ROLLOUT", 2, 121), 1), (seen("ROLLOUT", 2, 100, -21), 1)],
)
def test_the_command_fails_if_a_phase_is_not_explained_or_has_grown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], later: MemoryObserved, code: int
) -> None:
    folder = write(tmp_path, ready(), seen("ROLLOUT", 1, 100), later)
    assert run(["bench", "hbm", str(folder)]) == code
    assert "NVIDIA H200: overhead 3.00 GiB; 2% of the device are 20.00 GiB" in capsys.readouterr().out


def test_a_run_without_a_gpu_or_without_iterations_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, ready(), seen("ROLLOUT", 0, 1))
    with pytest.raises(DataError, match="1 GPUs, 0 phases"):
        read_hbm(folder, warmup=1)
