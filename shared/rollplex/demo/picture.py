"""Scans with the model's answers as lines of text for a terminal. Knows nothing of where the answers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rollplex.demo.answers import Answer

SIDE: Final = 8
"""Pixels of a scan: columns of text, and twice the lines."""
_GAP: Final = "  "
_INDENT: Final = "  "
_INK: Final = 100
"""From this value on, of 255, a pixel is drawn where there are no greys."""
_BLOCKS: Final = " ▄▀█"
_RAMP: Final = " .:-=+*#%@"
_GREEN, _RED = "\x1b[32m", "\x1b[31m"
_RESET: Final = "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class Screen:
    """What the output can show."""

    width: int
    """Columns."""
    is_unicode: bool
    has_colours: bool
    """256 of them, by ANSI escapes."""

    @property
    def num_scans(self) -> int:
        """How many scans fit beside each other."""
        return max(1, (self.width - len(_INDENT) + len(_GAP)) // (SIDE + len(_GAP)))


def draw(answers: Sequence[Answer], screen: Screen) -> list[str]:
    """One row of scans, four lines high, with answer and verdict under each; wrong ones also with the truth.

    Raises:
        OSError: a picture cannot be read.
    """
    scans = [_scan(answer.picture) for answer in answers]
    lines = [_GAP.join(_pixels(scan, line, screen) for scan in scans) for line in range(0, SIDE, 2)]
    lines.append(_GAP.join(_verdict(answer, screen) for answer in answers))
    lines.append(_GAP.join(("" if a.is_right else f"is {a.truth}"[:SIDE]).center(SIDE) for a in answers))
    return [(_INDENT + line).rstrip() for line in lines if line.strip()]


def _scan(picture: Path) -> NDArray[np.int64]:
    """The picture's brightness [8, 8], 0 to 255."""
    with Image.open(picture) as image:
        small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.int64)


def _pixels(scan: NDArray[np.int64], line: int, screen: Screen) -> str:
    """Pixel lines `line` and `line` + 1 of a scan, in one line of text of 8 columns."""
    upper, lower = scan[line], scan[line + 1]
    if not screen.is_unicode:
        return "".join(_RAMP[value * (len(_RAMP) - 1) // 255] for value in np.maximum(upper, lower))
    if not screen.has_colours:
        return "".join(_BLOCKS[2 * (up >= _INK) + (low >= _INK)] for up, low in zip(upper, lower, strict=True))
    return "".join(f"\x1b[38;5;{_grey(u)};48;5;{_grey(v)}m▀" for u, v in zip(upper, lower, strict=True)) + _RESET


def _grey(value: int) -> int:
    """The terminal's colour for a brightness: 232 is almost black, 255 almost white."""
    return 232 + int(value) * 23 // 255


def _verdict(answer: Answer, screen: Screen) -> str:
    """Eight columns: the answer, and whether it is right."""
    right, wrong = ("✓", "✗") if screen.is_unicode else ("ok", "wrong")
    mark = right if answer.is_right else wrong
    text = f"{answer.shown[: SIDE - len(mark) - 1]} {mark}".center(SIDE)
    if not screen.has_colours:
        return text
    before, _, after = text.rpartition(mark)
    return f"{before}{_GREEN if answer.is_right else _RED}{mark}{_RESET}{after}"
