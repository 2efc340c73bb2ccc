"""What the check of a whole dataset finds, as numbers: for `rollplex data check`.

The rows are checked by the code that checks them at the start of a run (`checking`, `noticed`). Does not know how a
report is shown.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from rollplex.data.checking import RowChecker, RowFacts
from rollplex.data.images import ImageFolder
from rollplex.data.noticed import Noticed
from rollplex.data.preparing import prepare_row
from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.rows import Row, Rows
from rollplex.data.source import model_of
from rollplex.data.tokenizer import TextTokenizer
from rollplex.data.videos import Videos, videos_of_source
from rollplex.errors import DataError
from rollplex.protocol.inputs import DataSource

MAX_ERRORS = 1000
MAX_BARS = 12


class Bar(Struct, frozen=True, kw_only=True):
    """How many values lie from `low` to `high`, both included."""

    low: int
    high: int
    count: int


class Histogram(Struct, frozen=True, kw_only=True):
    """Of whole numbers."""

    least: int
    median: int
    most: int
    bars: tuple[Bar, ...]


class Problem(Struct, frozen=True, kw_only=True):
    """A row that cannot be used: the parts of its error."""

    row: int
    where: str
    what: str
    got: str
    needed: str
    do: str


class First(Struct, frozen=True, kw_only=True):
    """The prompt of the first good row."""

    row: int
    text: str
    """As rendered, one placeholder for each medium; without a model as it stands in the row, as JSON."""
    tokens: int = 0
    marked: str = ""
    """As the model gets it, runs of media tokens counted: "<|vision_start|>[image 1: 64 tokens]<|vision_end|>"."""


class Report(Struct, frozen=True, kw_only=True):
    """Of one dataset."""

    file: str
    format: str
    shape: str
    columns: tuple[str, ...]
    """Of the first row."""
    model: str
    """The model folder; empty: checked without a model, so without tokens."""
    fingerprint: str
    """As a run records it."""
    rows: int
    good_rows: int
    num_errors: int
    kinds: dict[str, int]
    """How many errors say the same."""
    errors: tuple[Problem, ...]
    """The first 1000."""
    warnings: tuple[str, ...]
    duplicates: tuple[tuple[int, ...], ...]
    """Rows with the same prompt and the same media."""
    images: int
    videos: int
    rows_without_media: int
    image_sides: Histogram | None
    """Of √(width × height) in the file; None without images."""
    smallest_image: tuple[int, int] | None
    """Width and height."""
    largest_image: tuple[int, int] | None
    video_frames: Histogram | None
    prompt_tokens: Histogram | None
    """Media expanded; None without a model, or without good rows."""
    media_tokens: Histogram | None
    """Of rows with media."""
    first: First | None


def examine(source: DataSource, model: Path | None, *, decode: bool) -> Report:
    """Check every row of a dataset.

    Args:
        source: the dataset; `skip_bad_rows` is not looked at.
        model: folder of the model; None: without one.
        decode: decode every image.

    Raises:
        DataError: the dataset, its image folder, or its first row as a whole cannot be used; not for single rows.
        ModelError, ConfigError: a model folder or options that cannot be used.
    """
    rows = Rows.of(source)
    maker, rules = (None, None) if model is None else model_of(source, model, TextTokenizer(model))
    images = ImageFolder(Path(source.image_dir), source.max_image_pixels)
    videos = (
        videos_of_source(source, images)
        if rules is None
        else videos_of_source(source, images, rules.video.temporal_patch)
    )
    checker = RowChecker(
        rows, images, videos, maker=maker, rules=rules, max_prompt_tokens=source.max_prompt_tokens, decode=decode
    )
    template = b"" if maker is None else maker.template_digest
    digest = hashlib.blake2b(rows.digest + template, digest_size=32)
    noticed, problems = Noticed(), _Problems()
    good: list[int] = []
    tally = _Tally()
    for number in range(len(rows)):
        try:
            facts = checker.check(number, digest.update)
        except DataError as error:
            problems.add(error, number)
            continue
        good.append(number)
        noticed.add(facts, number)
        tally.add(facts)
    return Report(
        file=source.path,
        format=rows.format,
        shape=rows.shape.name,
        columns=rows.columns,
        model="" if model is None else str(model),
        fingerprint=digest.hexdigest(),
        rows=len(rows),
        good_rows=len(good),
        num_errors=sum(problems.kinds.values()),
        kinds=dict(problems.kinds),
        errors=tuple(problems.listed),
        warnings=tuple(noticed.sentences()),
        duplicates=noticed.duplicates,
        images=len(tally.sizes),
        videos=len(tally.frames),
        rows_without_media=tally.without,
        image_sides=histogram([round((width * height) ** 0.5) for width, height in tally.sizes], doubling=True),
        smallest_image=min(tally.sizes, key=lambda size: size[0] * size[1], default=None),
        largest_image=max(tally.sizes, key=lambda size: size[0] * size[1], default=None),
        video_frames=histogram(tally.frames),
        prompt_tokens=histogram(tally.tokens) if maker is not None else None,
        media_tokens=histogram(tally.media_tokens) if maker is not None else None,
        first=_first(rows.row(good[0]), images, videos, maker, rules) if good else None,
    )


def histogram(values: Sequence[int], *, doubling: bool = False) -> Histogram | None:
    """Of these values; None if there are none.

    Args:
        values: not negative.
        doubling: each bar twice as wide as the one before, from powers of two; else all of one round width.
    """
    if not values:
        return None
    least, most = min(values), max(values)
    if doubling:
        edges = [0, *(2**power for power in range(most.bit_length() + 1))]
    else:
        width = _round_width(most - least + 1)
        edges = list(range(least // width * width, most + width + 1, width))
    bars = [
        Bar(low=low, high=high - 1, count=sum(low <= value < high for value in values))
        for low, high in itertools.pairwise(edges)
    ]
    while bars and not bars[0].count:
        bars.pop(0)
    while bars and not bars[-1].count:
        bars.pop()
    return Histogram(least=least, median=round(statistics.median(values)), most=most, bars=tuple(bars))


def _round_width(spread: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, … that makes few enough bars."""
    power = 1
    while True:
        for width in (power, 2 * power, 5 * power):
            if spread <= width * (MAX_BARS - 1):
                return width
        power *= 10


class _Tally:
    """Numbers gathered over good rows."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.frames: list[int] = []
        self.tokens: list[int] = []
        self.media_tokens: list[int] = []
        self.without = 0

    def add(self, facts: RowFacts) -> None:
        self.sizes += facts.images
        self.frames += [frames for frames, _, _ in facts.videos]
        self.tokens.append(facts.tokens)
        if facts.images or facts.videos:
            self.media_tokens.append(facts.media_tokens)
        else:
            self.without += 1


class _Problems:
    """Errors, the first so many kept."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.listed: list[Problem] = []

    def add(self, error: DataError, row: int) -> None:
        self.kinds[error.what] += 1
        if len(self.listed) < MAX_ERRORS:
            parts = {name: getattr(error, name) for name in ("where", "what", "got", "needed", "do")}
            self.listed.append(Problem(row=row, **parts))


def _first(row: Row, images: ImageFolder, videos: Videos, maker: PromptMaker | None, rules: Rules | None) -> First:
    if maker is None or rules is None:
        return First(row=row.number, text=msgspec.json.encode(row.prompt).decode())
    prompt = prepare_row(row, images, videos, maker, rules).prompt
    return First(row=row.number, text=maker.render(row), tokens=len(prompt.ids), marked=maker.marked(prompt.ids))
