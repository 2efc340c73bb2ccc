"""One dataset, open: its check, and its rows as the model takes them.

The check reads every row and every image's header and counts exactly what the rows will need. No image is decoded
unless that is the only way to tell whether it is whole, or bad rows are to be left out (then every image is decoded
once, so that a row found good stays good). What the check counted is compared when a row is prepared: a file that
changed is noticed. Does not know segments or messages but its result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rollplex.data.images import Header, ImageFolder, name_of
from rollplex.data.inputs import Prepared
from rollplex.data.media import Clip, Place
from rollplex.data.patches import Grid, Patches, image_grid, image_patches, video_grid, video_patches
from rollplex.data.processor import Rules, read_rules
from rollplex.data.prompts import PromptMaker, Skeleton
from rollplex.data.rows import Row, Rows, located
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import DataError
from rollplex.layout.shape import read_shape
from rollplex.protocol.inputs import DataSource, SourceChecked

MAX_REASONS = 1000
MAX_REASON_CHARS = 2000
_UNCHECKED = -1
_REJECTED = -2


class Source:
    """A dataset of one model.

    Raises:
        DataError: the dataset or its image folder cannot be opened.
    """

    def __init__(self, source: DataSource, maker: PromptMaker, rules: Rules) -> None:
        self._source = source
        self._maker = maker
        self._rules = rules
        self._rows = Rows.of(source)
        self._images = ImageFolder(Path(source.image_dir), source.max_image_pixels)
        self._headers: dict[str, Header] = {}
        self._tokens = np.full(len(self._rows), _UNCHECKED, np.int64)
        self._media_rows = np.zeros(len(self._rows), np.int64)

    def check(self) -> SourceChecked:
        """Check every row.

        Raises:
            DataError: the first bad row, unless bad rows are left out; or no good row at all.
        """
        digest = hashlib.blake2b(self._rows.digest, digest_size=32)
        reasons: list[str] = []
        for number in range(len(self._rows)):
            try:
                self._check_row(number, digest.update)
            except DataError as error:
                if not self._source.skip_bad_rows:
                    raise
                self._tokens[number] = _REJECTED
                reasons.append(str(error)[:MAX_REASON_CHARS])
        self._headers.clear()
        return self._checked(digest.hexdigest(), reasons)

    def prepare(self, number: int) -> Prepared:
        """Decode, patch and tokenize one row.

        Raises:
            DataError: the row is bad, was rejected, or is not what it was at the check.
        """
        row = self._rows.row(number)
        try:
            return self._prepare(row)
        except DataError as error:
            raise located(error, self._rows.where(number)) from error

    def _prepare(self, row: Row) -> Prepared:
        skeleton = self._maker.skeleton(row)
        images = iter(image_patches(self._images.load(name), self._rules.image) for name in row.images)
        videos = iter(self._video(clip) for clip in row.videos)
        media = tuple(next(images) if kind == "image" else next(videos) for kind in skeleton.kinds)
        prompt = self._maker.finish(skeleton, [patches.grid for patches in media], self._seconds(skeleton, row))
        counted = (int(self._tokens[row.number]), int(self._media_rows[row.number]))
        found = (len(prompt.ids), sum(patches.grid.rows for patches in media))
        if counted[0] != _UNCHECKED and counted != found:
            raise DataError(
                "This row is not what it was when the run began",
                got=f"{found[0]} tokens, {found[1]} pixel rows",
                needed="a rejected row is not used" if counted[0] == _REJECTED else f"{counted[0]} and {counted[1]}",
                do="Do not change images during a run.",
            )
        return Prepared(row=row.number, prompt=prompt, media=media)

    def _video(self, clip: Clip) -> Patches:
        pictures = [self._images.load(place) for place in clip.frames]
        _same_size(clip.frames, [picture.size for picture in pictures])
        return video_patches(pictures, self._rules.video)

    def _seconds(self, skeleton: Skeleton, row: Row) -> list[float | None]:
        """Seconds per temporal patch for each placeholder; None for images."""
        videos = iter(row.videos)
        per_patch = self._rules.video.temporal_patch
        return [None if kind == "image" else per_patch / next(videos).fps for kind in skeleton.kinds]

    def _check_row(self, number: int, identify: Callable[[bytes], None]) -> None:
        row = self._rows.row(number)
        try:
            grids = [self._image_grid(place, identify) for place in row.images]
            grids += [self._video_grid(clip, identify) for clip in row.videos]
            skeleton = self._maker.skeleton(row)
            merge = self._rules.image.merge
            tokens = len(skeleton.ids) + sum(grid.tokens(merge) - 1 for grid in grids)
            most = self._source.max_prompt_tokens
            if most and tokens > most:
                raise DataError(
                    "This prompt is too long",
                    got=f"{tokens} tokens, {sum(grid.tokens(merge) for grid in grids)} of them for images and videos",
                    needed=f"at most {most}",
                    do="Shorten it, scale its images down, or raise data.max_prompt_tokens.",
                )
        except DataError as error:
            raise located(error, self._rows.where(number)) from error
        self._tokens[number] = tokens
        self._media_rows[number] = sum(grid.rows for grid in grids)

    def _image_grid(self, place: Place, identify: Callable[[bytes], None]) -> Grid:
        header = self._header(place, identify)
        return image_grid(header.height, header.width, self._rules.image)

    def _video_grid(self, clip: Clip, identify: Callable[[bytes], None]) -> Grid:
        headers = [self._header(place, identify) for place in clip.frames]
        _same_size(clip.frames, [(header.width, header.height) for header in headers])
        return video_grid(len(clip.frames), headers[0].height, headers[0].width, self._rules.video)

    def _header(self, place: Place, identify: Callable[[bytes], None]) -> Header:
        header = self._headers.get(place) if isinstance(place, str) else None
        if header is None:
            header = self._images.header(place, decode=self._source.skip_bad_rows)
            if isinstance(place, str):
                self._headers[place] = header
        identify(header.identity)
        return header

    def _checked(self, fingerprint: str, reasons: list[str]) -> SourceChecked:
        good = np.flatnonzero(self._tokens >= 0)
        if not len(good):
            raise DataError(
                "This dataset has no good row",
                got=f"{len(self._rows)} bad ones, the first: {reasons[0]}",
                where=self._source.path,
            )
        if len(reasons) > MAX_REASONS:
            reasons = [*reasons[: MAX_REASONS - 1], f"… and {len(reasons) - MAX_REASONS + 1} more"]
        most_rows = int(self._media_rows[good].max())
        return SourceChecked(
            name=self._source.name,
            fingerprint=fingerprint,
            num_rows=len(self._rows),
            good_rows=None if len(good) == len(self._rows) else tuple(good.tolist()),
            rejected=tuple(reasons),
            max_prompt_tokens=int(self._tokens[good].max()),
            max_media_rows=most_rows,
            max_media_tokens=most_rows // self._rules.image.merge**2,
        )


def open_source(source: DataSource, folder: Path, tokenizer: TextTokenizer) -> Source:
    """Open a dataset for the model of a folder.

    Args:
        source: the dataset.
        folder: the model's.
        tokenizer: the model's, which takes a while to read.

    Raises:
        DataError: the dataset or its image folder cannot be opened.
        ModelError: a model folder that cannot be used.
        ConfigError: options that cannot be used, or a package that is not installed.
    """
    shape = read_shape(folder)
    template = Path(source.chat_template) if source.chat_template else None
    maker = PromptMaker(tokenizer, shape, template)
    rules = read_rules(folder, shape, min_pixels=source.min_pixels, max_pixels=source.max_pixels)
    return Source(source, maker, rules)


def _same_size(frames: Sequence[Place], sizes: Sequence[tuple[int, int]]) -> None:
    for place, size in zip(frames, sizes, strict=True):
        if size != sizes[0]:
            raise DataError(
                "The frames of a video differ in size",
                got=f"{name_of(place)!r}, {size[0]} x {size[1]}",
                needed=f"{sizes[0][0]} x {sizes[0][1]}, as its first frame",
            )
