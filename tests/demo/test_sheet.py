"""The picture of scans with answers: which are on it, and in which colour."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from rollplex.demo.answers import read_answers
from rollplex.demo.sheet import write_sheet
from support.demo import Played


def _draw(played: Played, wrong: tuple[int, ...], file: Path) -> tuple[int, Image.Image]:
    (played.run_dir / "completions.jsonl").unlink(missing_ok=True)
    played.complete(played.responses(wrong=wrong))
    answers = read_answers(played.run_dir, played.data, name="held_out", step=400)
    num_shown = write_sheet(file, answers, title="Held-out scans")
    with Image.open(file) as sheet:
        sheet.load()
        return num_shown, sheet


def _reddish(sheet: Image.Image) -> int:
    pixels = np.asarray(sheet, dtype=np.int64)
    return int(((pixels[..., 0] > 120) & (pixels[..., 1] < 90)).sum())


def test_the_first_fifty_are_shown_and_then_the_mistakes(played: Played, tmp_path: Path) -> None:
    num_shown, right = _draw(played, (), tmp_path / "right.png")
    assert num_shown == 50
    assert right.size == (992, 32 + 30 + 5 * 112)
    assert _reddish(right) == 0
    num_shown, some_wrong = _draw(played, (3, 80, 81), tmp_path / "wrong.png")
    assert num_shown == 53
    assert some_wrong.size == (992, 32 + 2 * 30 + 6 * 112)
    assert _reddish(some_wrong) > 0


def test_of_many_mistakes_the_first_ten_are_shown(played: Played, tmp_path: Path) -> None:
    num_shown, _ = _draw(played, tuple(range(100)), tmp_path / "all.png")
    assert num_shown == 60


def test_each_scan_is_where_its_row_says(played: Played, tmp_path: Path) -> None:
    _, sheet = _draw(played, (), tmp_path / "a.png")
    answers = read_answers(played.run_dir, played.data, name="held_out", step=400)
    for index in (0, 9, 10, 49):
        x, y = 16 + index % 10 * 96, 16 + 30 + index // 10 * 112
        with Image.open(answers[index].picture) as picture:
            wanted = np.asarray(picture.convert("RGB").resize((84, 84), Image.Resampling.BICUBIC))
        assert (np.asarray(sheet.crop((x, y, x + 84, y + 84))) == wanted).all()
