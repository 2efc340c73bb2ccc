"""A timeline of a few iterations as one SVG, for a README: a lane per service, the phases above.

Owns what is drawn where. The light band behind rollout and prefix is the window: prefix work inside it is hidden. A
label that does not fit into its box is left out. The background is part of the picture, so that it is readable on any
page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from rollplex.errors import ConfigError
from rollplex.journal.events import UnitKind
from rollplex.journal.phases import Phase
from rollplex.trace import marks
from rollplex.trace.marks import Chapter, Mark, role_of
from rollplex.trace.palette import BOXES, phase_class, style
from rollplex.trace.svg import Canvas, text_width
from rollplex.trace.tracks import label
from rollplex.trace.where import hidden_share

MAX_ITERATIONS = 20
"""More cannot be told apart on a page."""
WIDTH = 960.0
_LEFT, _RIGHT = 92.0, 16.0
_PHASES_TOP, _PHASE, _LANES_TOP = 28.0, 20.0, 58.0
_LANE, _GAP = 30.0, 8.0
_PADDING, _MIN_BOX, _TICKS = 4.0, 0.7, 8
_SWATCH, _ROW = 12.0, 20.0


class _Scale(Struct, frozen=True):
    start_ns: int
    end_ns: int

    def x(self, at_ns: int) -> float:
        inside = min(max(at_ns, self.start_ns), self.end_ns) - self.start_ns
        return _LEFT + inside / max(1, self.end_ns - self.start_ns) * (WIDTH - _LEFT - _RIGHT)

    def box(self, mark: Mark) -> tuple[float, float]:
        """Left edge and width."""
        left = self.x(mark.start_ns)
        return left, max(self.x(_end(mark)) - left, _MIN_BOX)


def draw(chapters: Sequence[Chapter], name: str) -> str:
    """The picture of iterations, from the first phase of sampling to the last update.

    Args:
        chapters: finished iterations, in order.
        name: what the caption calls the run.

    Raises:
        ConfigError: there is none, or they are too many for one picture.
    """
    require_drawable(len(chapters))
    phases = [mark for chapter in chapters for mark in chapter.of("phase") if mark.name != Phase.IDLE.name]
    last = max(_end(mark) for mark in phases if mark.name == Phase.UPDATE.name)
    scale = _Scale(min(mark.start_ns for mark in phases if mark.name == Phase.ROLLOUT.name), last)
    lanes = _lanes(chapters)
    bottom = _LANES_TOP + len(lanes) * (_LANE + _GAP)
    rows = _legend_rows([kind for kind in BOXES if any(mark.kind == kind for _, found in lanes for mark in found)])
    height = bottom + 34 + (len(rows) + 1) * _ROW
    canvas = Canvas()
    canvas.rect(0, 0, (WIDTH, height), "bg")
    _windows(canvas, scale, chapters, [track for track, _ in lanes])
    _axis(canvas, scale, bottom)
    _phases(canvas, scale, phases)
    _iterations(canvas, scale, chapters, bottom)
    for index, (track, found) in enumerate(lanes):
        alone = sum(role_of(other) == role_of(track) for other, _ in lanes) == 1
        top = _LANES_TOP + index * (_LANE + _GAP)
        canvas.text(_LEFT - 10, top + _LANE / 2 + 4, role_of(track) if alone else track, "n")
        _lane(canvas, scale, found, top)
    _legend(canvas, rows, bottom + 34)
    caption = _caption(chapters, name)
    canvas.text(_LEFT, height - 8, caption, "t")
    return canvas.document((WIDTH, height), style(), caption)


def require_drawable(iterations: int) -> None:
    """Whether so many finished iterations make a picture.

    Raises:
        ConfigError: they do not.
    """
    if not 0 < iterations <= MAX_ITERATIONS:
        raise ConfigError(
            "These iterations do not make a picture",
            got=f"{iterations} finished ones",
            needed=f"1 to {MAX_ITERATIONS}",
            do="Choose others with --steps A:B.",
            where="--svg",
        )


# --- what is there ------------------------------------------------------------------------------------------------


def _lanes(chapters: Sequence[Chapter]) -> list[tuple[str, list[Mark]]]:
    """Tracks from top to bottom, each with what is drawn on it."""
    found: dict[str, list[Mark]] = {}
    for chapter in chapters:
        whole = not chapter.of("decode")  # a journal that does not tell prefill from decode
        for mark in chapter.marks:
            drawn = mark
            if whole and mark.kind == UnitKind.GENERATE:
                drawn = replace(mark, kind="decode")
            if drawn.kind in BOXES or drawn.kind == "group_finished":
                found.setdefault(drawn.track, []).append(drawn)
    order = sorted(found, key=lambda track: (track == marks.REWARDS, label(track).rank, track))
    return [(track, sorted(found[track], key=lambda mark: mark.start_ns)) for track in order]


def _caption(chapters: Sequence[Chapter], name: str) -> str:
    steps = [chapter.step for chapter in chapters if chapter.step is not None]
    which = f"iteration {steps[0]}" if len(steps) == 1 else f"iterations {steps[0]} to {steps[-1]}"
    share = hidden_share(chapters)
    hidden = "no prefix work" if share is None else f"{share:.0%} of prefix forward time in the rollout's window"
    rest = f", {which}: {hidden}"
    shown = name
    while shown and text_width(f"{shown}…{rest}") > WIDTH - _LEFT - _RIGHT:
        shown = shown[:-1]
    return (name if shown == name else f"{shown}…") + rest


# --- what is drawn ------------------------------------------------------------------------------------------------


def _windows(canvas: Canvas, scale: _Scale, chapters: Sequence[Chapter], tracks: list[str]) -> None:
    behind = [index for index, track in enumerate(tracks) if role_of(track) in {"rollout", "prefix"}]
    for chapter in chapters:
        units = chapter.of(UnitKind.GENERATE)
        if units and behind:
            left = scale.x(min(mark.start_ns for mark in units))
            right = scale.x(max(_end(mark) for mark in units))
            top = _LANES_TOP + behind[0] * (_LANE + _GAP) - _GAP / 2
            canvas.rect(left, top, (right - left, (behind[-1] - behind[0] + 1) * (_LANE + _GAP)), "w")


def _axis(canvas: Canvas, scale: _Scale, bottom: float) -> None:
    seconds = (scale.end_ns - scale.start_ns) / 1e9
    factor, unit = (1.0, "s") if seconds > 10 else (1e3, "ms")
    step = _nice(seconds * factor / _TICKS)
    canvas.text(_LEFT - 10, bottom + 16, unit, "n")
    for tick in itertools.count():
        at = tick * step
        text = f"{at:g}"
        x = scale.x(scale.start_ns + round(at / factor * 1e9))
        if at > seconds * factor or x + text_width(text) / 2 > WIDTH:
            break
        canvas.line((x, _PHASES_TOP), (x, bottom + 2), "g")
        canvas.text(x, bottom + 16, text, "m")


def _phases(canvas: Canvas, scale: _Scale, phases: Sequence[Mark]) -> None:
    canvas.text(_LEFT - 10, _PHASES_TOP + 14, "phase", "n")
    for mark in phases:
        if mark.start_ns < scale.end_ns:
            left, width = scale.box(mark)
            canvas.rect(left, _PHASES_TOP, (width, _PHASE), phase_class(mark.name), _title(mark))
            _label(canvas, mark.name.lower(), (left, width), _PHASES_TOP + 14, "t")


def _iterations(canvas: Canvas, scale: _Scale, chapters: Sequence[Chapter], bottom: float) -> None:
    starts = [
        scale.x(min(mark.start_ns for mark in chapter.of("phase") if mark.name == Phase.ROLLOUT.name))
        for chapter in chapters
    ]
    for chapter, left, right in zip(chapters, starts, [*starts[1:], WIDTH - _RIGHT], strict=True):
        canvas.line((left, 8), (left, bottom + 2), "s")
        _label(canvas, f"iteration {chapter.step}", (left, right - left), 20, "d")


def _lane(canvas: Canvas, scale: _Scale, found: Sequence[Mark], top: float) -> None:
    rows: list[int] = []
    placed: list[tuple[Mark, int]] = []
    for mark in found:
        if mark.end_ns is not None:
            row = next((row for row, end_ns in enumerate(rows) if end_ns <= mark.start_ns), len(rows))
            rows[row : row + 1] = [mark.end_ns]
            placed.append((mark, row))
    height = _LANE / max(1, len(rows))
    for mark, row in placed:
        left, width = scale.box(mark)
        canvas.rect(left, top + row * height, (width, height), f"k-{mark.kind}", _title(mark))
        if len(rows) == 1:
            _label(canvas, BOXES[mark.kind][2], (left, width), top + _LANE / 2 + 4, "i")
    for mark in found:
        if mark.end_ns is None:
            x = scale.x(mark.start_ns)
            canvas.line((x, top - 3), (x, top + 5), "e")


def _legend_rows(kinds: Sequence[str]) -> list[list[tuple[str, str, float]]]:
    """Kind, words and x of every entry, row by row."""
    rows: list[list[tuple[str, str, float]]] = [[]]
    x = _LEFT
    for kind, text in [*((kind, BOXES[kind][0]) for kind in kinds), ("group_finished", "a group is sampled")]:
        width = _SWATCH + 6 + text_width(text) + 14
        if x + width > WIDTH and rows[-1]:
            rows.append([])
            x = _LEFT
        rows[-1].append((kind, text, x))
        x += width
    return rows


def _legend(canvas: Canvas, rows: Sequence[Sequence[tuple[str, str, float]]], top: float) -> None:
    for number, row in enumerate(rows):
        y = top + number * _ROW
        for kind, text, x in row:
            if kind == "group_finished":
                canvas.line((x + _SWATCH / 2, y), (x + _SWATCH / 2, y + _SWATCH), "e")
            else:
                canvas.rect(x, y, (_SWATCH, _SWATCH), f"k-{kind}")
            canvas.text(x + _SWATCH + 6, y + 10, text, "t")


def _label(canvas: Canvas, text: str, box: tuple[float, float], y: float, cls: str) -> None:
    """A text into a box, if it fits."""
    if text_width(text) + 2 * _PADDING <= box[1]:
        canvas.text(box[0] + _PADDING, y, text, cls)


def _title(mark: Mark) -> str:
    groups = "".join(f", groups {value}" for name, value in mark.args if name == "groups")
    return f"{mark.name}{groups}: {mark.seconds * 1e3:.1f} ms"


def _end(mark: Mark) -> int:
    return mark.start_ns if mark.end_ns is None else mark.end_ns


def _nice(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, …"""
    power = 10.0 ** math.floor(math.log10(max(step, 1e-9)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step)
