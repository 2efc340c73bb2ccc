"""The picture of a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from rollplex.bench.facts import Facts
from rollplex.bench.folder import Made
from rollplex.bench.plot import write_plot
from rollplex.bench.result import Result
from rollplex.bench.rows import PHASES, Row, choose_modes
from rollplex.bench.schedules import Plan, summed_up

MakeRow = Callable[..., Row]
SIX = choose_modes("serial,overlap,stream", "shared,replicated")


@pytest.fixture
def result(made: Made, facts: Facts, row: MakeRow) -> Result:
    rows = [row(mode.schedule, mode.prefix, repeat, iteration=2.0 + repeat) for mode in SIX for repeat in range(2)]
    plan = Plan(
        config=Path("c.yaml"), overrides=(), modes=SIX, repeats=2, iterations=4, warmup=1, out=Path("out"), command=""
    )
    return summed_up(plan, made, facts, rows)


def test_a_picture_names_machine_workload_modes_and_phases(result: Result, tmp_path: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        write_plot(result, tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    for words in (*(mode.name for mode in SIX), *PHASES, "AMD EPYC, 2 cores, 24 GiB", "P = 600", "2.50 s"):
        assert words in text, words


def test_the_suffix_is_the_format(result: Result, tmp_path: Path) -> None:
    write_plot(result, tmp_path / "p.PNG")
    with Image.open(tmp_path / "p.PNG") as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000
