"""Scans with the model's answers as one picture file. Knows nothing of where the answers come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from rollplex.demo.answers import Answer

COLUMNS: Final = 10
NUM_FIRST: Final = 50
NUM_MISTAKES: Final = 10
_PICTURE, _CELL_WIDTH, _CELL_HEIGHT = 84, 96, 112
_MARGIN: Final = 16
_TITLE_HEIGHT: Final = 30
_WHITE, _BLACK, _GREEN, _RED = (255, 255, 255), (30, 30, 30), (20, 120, 50), (190, 30, 30)
_FONT_SIZE: Final = 15


def write_sheet(file: Path, answers: Sequence[Answer], *, title: str) -> int:
    """Write a PNG: the first 50 scans by row, then the first 10 mistakes, each with the model's answer under it.

    Right answers are green; wrong ones are red and followed by the truth.

    Args:
        answers: by row.
        title: the first line of the picture.

    Returns:
        How many scans it shows.

    Raises:
        OSError: a scan cannot be read, or the file not written.
    """
    first = list(answers[:NUM_FIRST])
    all_mistakes = [answer for answer in answers if not answer.is_right]
    mistakes = all_mistakes[:NUM_MISTAKES]
    blocks = [(f"{title}. The first {len(first)}:", first)]
    if mistakes:
        which = "All" if len(mistakes) == len(all_mistakes) else f"The first {len(mistakes)} of the"
        blocks.append((f"{which} {len(all_mistakes)} mistakes:", mistakes))
    height = sum(_TITLE_HEIGHT + _lines(block) * _CELL_HEIGHT for _, block in blocks)
    sheet = Image.new("RGB", (COLUMNS * _CELL_WIDTH + 2 * _MARGIN, height + 2 * _MARGIN), _WHITE)
    top = _MARGIN
    for text, block in blocks:
        top = _paste(sheet, top, text, block)
    sheet.save(file)
    return len(first) + len(mistakes)


def _lines(block: Sequence[Answer]) -> int:
    return -(-len(block) // COLUMNS)


def _paste(sheet: Image.Image, top: int, text: str, block: Sequence[Answer]) -> int:
    """Draw one block from pixel line `top` on; where the next begins."""
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT_SIZE)
    draw.text((_MARGIN, top), text, fill=_BLACK, font=font)
    top += _TITLE_HEIGHT
    for index, answer in enumerate(block):
        x, y = _MARGIN + index % COLUMNS * _CELL_WIDTH, top + index // COLUMNS * _CELL_HEIGHT
        with Image.open(answer.picture) as picture:
            sheet.paste(picture.convert("RGB").resize((_PICTURE, _PICTURE), Image.Resampling.BICUBIC), (x, y))
        shown = answer.shown if answer.is_right else f"{answer.shown[:6]} (is {answer.truth})"
        place = (x + _PICTURE // 2, y + _PICTURE + 3)
        draw.text(place, shown, fill=_GREEN if answer.is_right else _RED, font=font, anchor="ma")
    return top + _lines(block) * _CELL_HEIGHT
