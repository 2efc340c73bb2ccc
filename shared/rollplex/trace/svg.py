"""The few SVG elements that a picture needs, as text. Knows nothing of what is drawn.

Same input, same bytes. No scripts, no fonts from elsewhere. How wide a text will be is not known before it is shown:
`text_width` says what it takes at most in the usual sans-serif fonts.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

FONT_PX = 12.0
_EMS = {**dict.fromkeys("fijlrtI .,:;'!|()[]-/", 0.42), **dict.fromkeys("mwMW%@", 1.0)}
_EM_LOWER, _EM_UPPER, _EM_OTHER = 0.64, 0.8, 1.1
"""Widths in the widest of the usual fonts (DejaVu Sans), by character, lower case and digits, upper case, others."""
_NOT_XML = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF), "?")


def text_width(text: str, size: float = FONT_PX) -> float:
    """Pixels, rather too many than too few."""
    return size * sum(_EMS.get(character) or _em(character) for character in text)


class Canvas:
    """Collects elements. Coordinates are pixels, y grows downwards."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def rect(self, x: float, y: float, size: tuple[float, float], cls: str, title: str = "") -> None:
        """A filled box; `title` is shown where the pointer rests on it."""
        box = f'<rect class="{cls}" x="{_number(x)}" y="{_number(y)}" width="{_number(size[0])}" '
        inner = f"><title>{_clean(title)}</title></rect>" if title else "/>"
        self._parts.append(f'{box}height="{_number(size[1])}"{inner}')

    def line(self, start: tuple[float, float], end: tuple[float, float], cls: str) -> None:
        """A straight line."""
        (x1, y1), (x2, y2) = start, end
        place = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
        self._parts.append(f'<line class="{cls}" {place}/>')

    def text(self, x: float, y: float, text: str, cls: str = "t") -> None:
        """One line of text; whether it begins, ends or is centred at x is the class's matter."""
        self._parts.append(f'<text class="{cls}" x="{_number(x)}" y="{_number(y)}">{_clean(text)}</text>')

    def document(self, size: tuple[float, float], style: Sequence[str], title: str) -> str:
        """The whole file."""
        width, height = _number(size[0]), _number(size[1])
        box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        said = quoteattr(title.translate(_NOT_XML))
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label={said}>'
        lines = [head, f"<title>{_clean(title)}</title>", "<style>", *style, "</style>", *self._parts, "</svg>", ""]
        return "\n".join(lines)


def _em(character: str) -> float:
    if not character.isascii():
        return _EM_OTHER
    return _EM_UPPER if character.isupper() else _EM_LOWER


def _number(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in {"-0", ""} else text


def _clean(text: str) -> str:
    return escape(text.translate(_NOT_XML))
