"""A GPU's memory against the books, from a journal written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.bench.hbm import read_hbm, table
from rollplex.cli.app import run
from rollplex.errors import DataError
from rollplex.journal.events import DeviceReady, Event, LeaseGranted, MemoryObserved
from rollplex.protocol.common import Device, Kind
from rollplex_coordinator.records.journal import Journal

GPU = Device(node=0, index=0)
TOTAL = 1000 * 2**30


def ready(device: Device = GPU) -> DeviceReady:
    return DeviceReady(
        device=device,
        gpu=device.index,
        uuid="GPU-1",
        name="NVIDIA H200",
        driver="580",
        total_bytes=TOTAL,
        free_bytes=TOTAL,
        sharing_asked="mps",
        sharing_used="mps",
    )


def seen(phase: str, step: int | None, used: int, difference: int = 0, device: Device = GPU) -> MemoryObserved:
    """In GiB."""
    return MemoryObserved(
        device=device,
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
    (hbm,) = read_hbm(folder, warmup=1)
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


def leased(lease: int, kind: Kind, gib: int, device: Device) -> LeaseGranted:
    return LeaseGranted(lease=lease, kind=kind, owner="trainer", device=device, size_bytes=gib * 2**30)


def test_each_of_several_gpus_has_its_own_peaks_and_segments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Device(node=0, index=1)
    folder = write(
        tmp_path,
        *(ready(), ready(other)),
        *(leased(1, Kind.ACTOR_WEIGHTS, 7, GPU), leased(2, Kind.GRADIENTS, 3, GPU), leased(3, Kind.GRADIENTS, 3, GPU)),
        leased(4, Kind.ACTOR_WEIGHTS, 7, other),
        *(seen("TRAIN", 1, 100), seen("TRAIN", 1, 50, device=other), seen("TRAIN", 2, 80, device=other)),
    )
    first, second = read_hbm(folder, warmup=1)
    assert [one.phases[0].most_bytes / 2**30 for one in (first, second)] == [100, 80]
    assert {kind: size / 2**30 for kind, size in first.standing_bytes.items()} == {"actor_weights": 7, "gradients": 6}
    assert (first.within, second.within) == (True, False)
    assert run(["bench", "hbm", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "device 0:1" in printed
    assert "segments from LOAD on, GiB: actor_weights 7.00, gradients 6.00" in printed


def test_a_run_without_a_gpu_or_without_iterations_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, ready(), seen("ROLLOUT", 0, 1))
    with pytest.raises(DataError, match="1 GPUs, 0 phases"):
        read_hbm(folder, warmup=1)
