"""What a column that a row lacks may be called instead: misspelt, or as other trainers have it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rollplex.similar import closest

_CLOSE = 0.7
"""difflib's similarity from which on a column is held for another: "imagse" has 0.83 to "images", "answer" 0.33."""
_KNOWN = ("image", "images", "video", "videos", "video_fps")


def rename_to(row: Mapping[str, object], wanted: str) -> str:
    """What to do about a row without a column: rename what seems to be it; empty if nothing does."""
    for name in row:
        if name != wanted and closest(name.lower(), [wanted], _CLOSE):
            return f'Rename "{name}" to "{wanted}".'
    return ""


def rename_to_media(columns: Mapping[str, object], kind: str) -> str:
    """What to do about a row without media of a kind: rename what seems to hold them; empty if nothing does.

    Args:
        columns: of the row.
        kind: "image" or "video".
    """
    for name, value in columns.items():
        if name in _KNOWN or not _may_hold(value, kind):
            continue
        if closest(name.lower(), [kind, f"{kind}s"], _CLOSE):
            wanted = kind if isinstance(value, str) else f"{kind}s"
            return f'Rename "{name}" to "{wanted}".'
    return ""


def _may_hold(value: object, kind: str) -> bool:
    """Whether a value has the form of a column of paths: for images also a single one, for videos a list of lists."""
    if isinstance(value, list) and value:
        return all(isinstance(item, str if kind == "image" else list) for item in value)
    return isinstance(value, str) and kind == "image"
