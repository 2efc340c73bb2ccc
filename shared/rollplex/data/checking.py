"""The check of one row: that it can be used, and exactly what it will need. At the start of a run and in `data check`.

No image is decoded unless that is the only way to tell whether it is whole, or it is asked for. Without a model only
what does not depend on one is checked. Does not know what is done about bad rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
from msgspec import Struct

from rollplex.data.columns import answer_in
from rollplex.data.images import Header, ImageFolder
from rollplex.data.media import Embedded, Footage, Place, Video
from rollplex.data.patches import Grid, image_grid, video_grid
from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker, marks_in
from rollplex.data.rows import Row, Rows, located
from rollplex.data.videos import VideoHeader, Videos
from rollplex.errors import DataError


class RowFacts(Struct, frozen=True, kw_only=True):
    """What the check of a good row found."""

    images: tuple[tuple[int, int], ...]
    """Width and height of each, as they are in the file."""
    videos: tuple[tuple[int, int, int], ...]
    """Frames, width and height of each."""
    tokens: int = 0
    """Of the prompt, media expanded. 0: not known without a model."""
    media_tokens: int = 0
    """Of them, those of images and videos."""
    media_rows: int = 0
    """Pixel rows."""
    literal: tuple[str, ...] = ()
    """<image>, <video>: marks that stand in the prompt as text, because the row has no media of that kind."""
    columns: tuple[str, ...] = ()
    """Names of those that reward functions get."""
    answered: bool = False
    """It has a right answer, where reward functions look for it."""
    identity: bytes
    """16 bytes: the same for rows with the same prompt and the same media."""


class RowChecker:
    """Checks rows of one dataset, for one model or for none.

    Args:
        rows: the dataset.
        images: its images.
        videos: its videos.
        maker: of the model's prompts; None: without a model.
        rules: of the model's images; None: without a model.
        max_prompt_tokens: longer prompts are bad rows; 0: no limit.
        decode: decode every image.
    """

    def __init__(
        self,
        rows: Rows,
        images: ImageFolder,
        videos: Videos,
        *,
        maker: PromptMaker | None,
        rules: Rules | None,
        max_prompt_tokens: int,
        decode: bool,
    ) -> None:
        self._rows = rows
        self._images = images
        self._videos = videos
        self._maker = maker
        self._rules = rules
        self._max_prompt_tokens = max_prompt_tokens
        self._decode = decode
        self._headers: dict[str, Header] = {}
        self._video_headers: dict[Video, VideoHeader] = {}

    def forget(self) -> None:
        """Let go of what was kept about images that several rows have."""
        self._headers.clear()
        self._video_headers.clear()

    def check(self, number: int, identify: Callable[[bytes], None] = lambda _: None) -> RowFacts:
        """Check one row.

        Args:
            number: of the row.
            identify: gets the identity of each of its images.

        Raises:
            DataError: the row cannot be used; names it.
        """
        row = self._rows.row(number)
        try:
            return self._check(row, identify)
        except DataError as error:
            raise located(error, self._rows.where(number)) from error

    def _check(self, row: Row, identify: Callable[[bytes], None]) -> RowFacts:
        digest = hashlib.blake2b(msgspec.json.encode(row.prompt), digest_size=16)

        def both(identity: bytes) -> None:
            identify(identity)
            digest.update(identity)

        images = [self._size(place, both) for place in row.images]
        videos = [self._video_size(video, both) for video in row.videos]
        kinds = (("image", row.images), ("video", row.videos))
        facts = RowFacts(
            images=tuple(images),
            videos=tuple(videos),
            literal=tuple(f"<{kind}>" for kind, media in kinds if not media and marks_in(row.prompt, kind)),
            columns=tuple(row.columns),
            answered=answer_in(row.columns) is not None,
            identity=digest.digest(),
        )
        return (
            facts if self._maker is None or self._rules is None else self._counted(row, facts, self._maker, self._rules)
        )

    def _counted(self, row: Row, facts: RowFacts, maker: PromptMaker, rules: Rules) -> RowFacts:
        """The facts with what the model will need."""
        grids: list[Grid] = [image_grid(height, width, rules.image) for width, height in facts.images]
        grids += [video_grid(frames, height, width, rules.video) for frames, width, height in facts.videos]
        skeleton = maker.skeleton(row)
        media_tokens = sum(grid.tokens(rules.image.merge) for grid in grids)
        tokens = len(skeleton.ids) + media_tokens - len(grids)
        if self._max_prompt_tokens and tokens > self._max_prompt_tokens:
            raise DataError(
                "This prompt is too long",
                got=f"{tokens} tokens, {media_tokens} of them for images and videos",
                needed=f"at most {self._max_prompt_tokens}",
                do="Shorten it, scale its images down, or raise data.max_prompt_tokens.",
            )
        return msgspec.structs.replace(
            facts, tokens=tokens, media_tokens=media_tokens, media_rows=sum(grid.rows for grid in grids)
        )

    def _size(self, place: Place, identify: Callable[[bytes], None]) -> tuple[int, int]:
        header = self._header(place)
        identify(header.identity)
        return header.width, header.height

    def _video_size(self, video: Video, identify: Callable[[bytes], None]) -> tuple[int, int, int]:
        header = self._video_headers.get(video)
        if header is None:
            header = self._videos.header(video, self._header, decode=self._decode)
            if isinstance(video, Footage) and isinstance(video.place, str):
                self._video_headers[video] = header
        for identity in header.identities:
            identify(identity)
        return header.frames, header.width, header.height

    def _header(self, place: Place) -> Header:
        """Of an image; kept, as several rows may have it."""
        if isinstance(place, Embedded):
            return self._images.header(place, decode=self._decode)
        header = self._headers.get(place)
        if header is None:
            header = self._headers[place] = self._images.header(place, decode=self._decode)
        return header
