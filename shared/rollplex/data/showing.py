"""A row as people are shown it: its prompt as text, its images and videos as small pictures.

Owns the bounds: pictures of at most MAX_SIDE pixels a side, MAX_MEDIA of them, texts of at most MAX_CHARS characters.
What cannot be shown says why; it is never an error. Pictures are encoded anew from their pixels, so nothing else of a
file (profiles, comments) goes on.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

from PIL import Image

from rollplex.data.images import ImageFolder
from rollplex.data.prompts import PromptMaker
from rollplex.data.rows import Rows
from rollplex.data.videos import Videos
from rollplex.errors import ConfigError, DataError, ModelError
from rollplex.protocol.inputs import MAX_MEDIA_SHOWN, RowShown, Thumbnail

MAX_SIDE = 96
MAX_CHARS = 16_000


def show_row(rows: Rows, number: int, images: ImageFolder, videos: Videos, maker: PromptMaker) -> RowShown:
    """One row, read anew; of a video its first frame."""
    try:
        row = rows.row(number)
        prompt = maker.render(row)
    except (DataError, ConfigError, ModelError) as error:
        return RowShown(row=number, problem=_text(str(error)))
    loads: list[tuple[str, Callable[[], Image.Image]]] = []
    loads += [(f"image {at}", partial(images.load, place)) for at, place in enumerate(row.images, 1)]
    loads += [(f"video {at}", partial(videos.first, video)) for at, video in enumerate(row.videos, 1)]
    return RowShown(
        row=number,
        prompt=_text(prompt),
        media=tuple(thumbnail(name, load) for name, load in loads[:MAX_MEDIA_SHOWN]),
        left_out=max(0, len(loads) - MAX_MEDIA_SHOWN),
    )


def thumbnail(name: str, load: Callable[[], Image.Image]) -> Thumbnail:
    """What `load` gives (mode RGB), no larger than MAX_SIDE, as PNG; or why there is nothing."""
    try:
        picture = load()
    except (DataError, ConfigError) as error:
        return Thumbnail(name=name, problem=_text(str(error)))
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    pixels = Image.frombytes("RGB", picture.size, picture.tobytes())
    file = io.BytesIO()
    pixels.save(file, format="PNG")
    return Thumbnail(name=name, png=file.getvalue(), width=pixels.width, height=pixels.height)


def _text(text: str) -> str:
    """What a message can carry."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"
