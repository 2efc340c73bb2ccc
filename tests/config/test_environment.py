"""The environment is read in one module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rollplex
from rollplex.config.environment import child_environment, read_environment


def test_runs_go_into_the_current_folder_unless_told_otherwise() -> None:
    assert read_environment({}).runs_dir == Path("runs")
    assert read_environment({"ROLLPLEX_RUNS_DIR": ""}).runs_dir == Path("runs")
    assert read_environment({"ROLLPLEX_RUNS_DIR": "/x"}).runs_dir == Path("/x")


@pytest.mark.parametrize(
    ("variables", "can"),
    [
        ({"TERM": "xterm"}, True),
        ({}, False),
        ({"TERM": ""}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "TTY_COMPATIBLE": "0"}, False),
    ],
)
def test_a_terminal_can_be_drawn_on_unless_it_says_otherwise(variables: dict[str, str], can: bool) -> None:
    assert read_environment(variables).can_draw is can


def test_home_and_what_a_report_shows() -> None:
    found = read_environment({"HOME": "/h", "OMP_NUM_THREADS": "1", "SECRET_TOKEN": "x"})
    assert (found.home, found.shown) == (Path("/h"), {"OMP_NUM_THREADS": "1"})
    assert read_environment({}).home is None


def test_a_child_gets_our_environment_with_its_threads_and_without_a_model_hub() -> None:
    child = child_environment(threads=3, variables={"PATH": "/bin", "OMP_NUM_THREADS": "64"})
    assert child["PATH"] == "/bin"
    assert child["OMP_NUM_THREADS"] == "3"
    assert child["HF_HUB_OFFLINE"] == "1"


def test_no_other_module_of_the_configuration_the_presets_the_demo_or_the_cli_reads_the_environment() -> None:
    package = Path(rollplex.__file__).parent
    for folder in ("config", "presets", "demo", "cli"):
        for file in (package / folder).glob("*.py"):
            if file.name != "environment.py":
                assert not re.search(r"environ\b|getenv|expanduser|Path\.home", file.read_text()), file
