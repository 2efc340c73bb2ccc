"""Scans as text: what is bright is drawn, whatever the screen can show."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rollplex.demo.answers import Answer
from rollplex.demo.picture import Screen, draw

BLOCKS = Screen(width=100, is_unicode=True, has_colours=False)
ASCII = Screen(width=100, is_unicode=False, has_colours=False)
COLOURS = Screen(width=100, is_unicode=True, has_colours=True)


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    """A bright left column, a half bright top line, on black."""
    pixels = np.zeros((8, 8), dtype=np.uint8)
    pixels[0] = 130
    pixels[:, 0] = 255
    file = tmp_path / "scan.png"
    Image.fromarray(pixels).resize((56, 56), Image.Resampling.NEAREST).convert("RGB").save(file)
    return file


def _answer(scan: Path, response: str, truth: str = "4") -> Answer:
    return Answer(row=0, picture=scan, truth=truth, response=response, is_right=response == truth)


def test_two_lines_of_pixels_are_one_of_half_blocks(scan: Path) -> None:
    assert draw([_answer(scan, "4")], BLOCKS) == ["  █▀▀▀▀▀▀▀", "  █", "  █", "  █", "    4 ✓"]


def test_without_unicode_a_ramp_of_characters_is_used(scan: Path) -> None:
    lines = draw([_answer(scan, "4"), _answer(scan, "7")], ASCII)
    assert lines[:2] == ["  @=======  @=======", "  @         @"]
    assert lines[4].split() == ["4", "ok", "7", "wrong"]
    assert lines[5].split() == ["is", "4"]
    assert all(line.isascii() for line in lines)


def test_with_colours_each_pixel_has_its_grey(scan: Path) -> None:
    first, *_, verdicts = draw([_answer(scan, "4")], COLOURS)
    greys = re.findall(r"38;5;(\d+);48;5;(\d+)m▀", first)
    assert greys[0] == ("255", "255")
    assert set(greys[1:]) == {("243", "232")}
    assert first.endswith("\x1b[0m")
    assert "4 \x1b[32m✓\x1b[0m" in verdicts


def test_a_wrong_answer_is_marked_and_followed_by_the_truth_below_its_own_scan(scan: Path) -> None:
    lines = draw([_answer(scan, "4"), _answer(scan, "7")], BLOCKS)
    assert lines[4].index("7 ✗") - lines[4].index("4 ✓") == 10
    assert lines[5].strip() == "is 4"
    assert lines[5].index("is 4") >= 12


def test_columns_stay_in_line_whatever_was_answered(scan: Path) -> None:
    long = draw([_answer(scan, "nonsense\x1b[31m"), _answer(scan, "4")], BLOCKS)
    short = draw([_answer(scan, "7"), _answer(scan, "4")], BLOCKS)
    assert long[4].index("4 ✓") == short[4].index("4 ✓")
    assert "\x1b" not in "".join(long)


def test_eight_scans_fit_eighty_columns_and_fewer_a_narrow_screen(scan: Path) -> None:
    wide, narrow = (Screen(width=width, is_unicode=True, has_colours=False) for width in (80, 41))
    assert (wide.num_scans, narrow.num_scans) == (8, 4)
    for screen in (wide, narrow):
        assert max(map(len, draw([_answer(scan, "4")] * screen.num_scans, screen))) <= screen.width
