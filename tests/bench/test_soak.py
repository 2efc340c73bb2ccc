"""The rows of a memory bench, and its table."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from rollplex.bench.plot import write_memory_plot
from rollplex.bench.resident import Growth, Sample
from rollplex.bench.soak import Soak, lines, write_rows
from rollplex.config.loading import load


def test_pictures_have_about_the_size_asked_for_and_the_configuration_covers_all_epochs(tmp_path: Path) -> None:
    config = load(write_rows(tmp_path, rows=6, image_bytes=50_000, prompts=2, epochs=3))
    assert config.run.iterations == 9
    pictures = sorted((tmp_path / "images").iterdir())
    assert len(pictures) == len({picture.read_bytes() for picture in pictures}) == 6
    assert all(0.9 < picture.stat().st_size / 50_000 < 1.1 for picture in pictures)
    with Image.open(pictures[0]) as picture:
        assert picture.size == (129, 129)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 6


def _soak(sizes: tuple[float, ...]) -> Soak:
    return Soak(
        rows=100,
        image_bytes=1_000_000,
        epochs=3,
        prompts=10,
        seconds=12.0,
        samples=tuple(Sample(at_s=n, iterations=n * 10, bytes={"input": int(size)}) for n, size in enumerate(sizes)),
        growth=(Growth(process="input", epochs=sizes), Growth(process="trainer", epochs=(2.0**20,) * 3)),
    )


def test_the_table_names_the_process_that_grows_most_and_judges_it() -> None:
    assert lines(_soak((100 * 2.0**20, 101 * 2.0**20, 101 * 2.0**20))) == [
        "resident memory in MiB at the end of each epoch (100 rows of 1.0 MB, 12 s)",
        "                    epoch 1   epoch 2   epoch 3    growth",
        "input                 100.0     101.0     101.0      1.0%",
        "trainer                 1.0       1.0       1.0      0.0%",
        "memory does not grow: at most 1.0% (input), bound 2%",
    ]
    assert lines(_soak((100.0, 101.0, 103.0)))[-1] == "memory grows: at most 3.0% (input), bound 2%"


def test_it_can_be_drawn(tmp_path: Path) -> None:
    write_memory_plot(_soak((100.0, 101.0, 103.0)), tmp_path / "memory.svg")
    assert "input" in (tmp_path / "memory.svg").read_text()
