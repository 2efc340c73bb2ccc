"""The channel between the coordinator and its input child."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct, field

from rollplex.protocol.common import (
    MAX_ITEMS,
    Alive,
    Count,
    Failed,
    Leave,
    Leaving,
    Name,
    PromptSlot,
    Received,
    SegmentRef,
    Text,
)

MAX_ROWS_SHOWN = 64
MAX_MEDIA_SHOWN = 8
"""Pictures of one row."""
MAX_COLUMNS = 4096
"""Of one dataset."""


class ShapeName(StrEnum):
    """Whose rows a dataset has (`rollplex.data.shapes`). AUTO: by the columns of its first row."""

    AUTO = "auto"
    TRL = "trl"
    VERL = "verl"
    EASYR1 = "easyr1"
    MS_SWIFT = "ms_swift"
    LLAVA = "llava"


class DataSource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One dataset as the input child and the reward child read it."""

    name: Name
    """"train", or the name of an evaluation."""
    path: Name
    image_dir: Name
    max_prompt_tokens: Count
    """0: no limit of its own."""
    max_image_pixels: Count
    """Declared width x height above this is refused before decoding."""
    skip_bad_rows: bool
    split: Name = ""
    """Of a folder that has several; empty: it has none."""
    shape: ShapeName = ShapeName.AUTO
    columns: Annotated[dict[Name, Name], Meta(max_length=32)] = field(default_factory=dict)
    """Names that the shape knows, each with the column of the file that is meant."""
    format_prompt: Text = ""
    """jinja2, or a file of it; the question is `content`. Empty: prompts stay as they are."""
    chat_template: Name = ""
    """A file. Empty: the model's own."""
    min_pixels: Count = 0
    """Of an image, or a frame of a video, after scaling. 0: as the model's processor files say."""
    max_pixels: Count = 0
    """Likewise."""
    video_fps: Annotated[float, Meta(ge=0.001, le=1000.0)] = 2.0
    """Frames taken of a second of a video file."""
    max_frames: Annotated[int, Meta(ge=2, le=4096)] = 64
    """Of one video file."""


# coordinator -> input, once: open the datasets and check every row (JSON, fields, files, image headers, token counts).
# Answer: DataChecked.
class OpenData(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    model_path: Name
    sources: Annotated[tuple[DataSource, ...], Meta(max_length=64)]
    never_sample: Annotated[tuple[Name, ...], Meta(max_length=MAX_ITEMS)]
    """Tokens (text) that the configuration adds to the media and padding ids."""
    stop_tokens: Annotated[tuple[Name, ...], Meta(max_length=MAX_ITEMS)]
    """Tokens (text); empty means the model's own end-of-sequence ids."""


class Column(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A column that a reward function may ask for: which of the good rows have it, if only as null."""

    name: Name
    rows: Count
    """How many have it."""
    place: Text = ""
    """The first that lacks it, as errors name it: file:line (row n). Empty: all have it."""


class SourceChecked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the check of one dataset found."""

    name: Name
    fingerprint: Name
    """Of the rows' bytes and the size and modification-independent identity of their images."""
    num_rows: Count
    """Lines of the file: row numbers go from 0 to num_rows - 1."""
    good_rows: Annotated[tuple[Count, ...], Meta(max_length=16_777_216)] | None
    """None: all rows are good."""
    rejected: Annotated[tuple[Text, ...], Meta(max_length=1000)]
    """Why, for each rejected row (skip_bad_rows)."""
    max_prompt_tokens: Count
    max_media_rows: Count
    """Most pixel rows of one prompt."""
    max_media_tokens: Count
    warnings: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    """What is odd about the rows, and not an error; a sentence for each kind."""
    columns: Annotated[tuple[Column, ...], Meta(max_length=MAX_COLUMNS)] | None = None
    """Every one that a good row has and that can be an argument's name. None: not known, or too many."""
    answers: Column | None = None
    """The rows with a right answer (reward_model.ground_truth, ground_truth, answer or solution), null being none."""
    place: Text = ""
    """The first good row, as errors name it."""

    @property
    def num_good(self) -> int:
        """How many rows are good."""
        return self.num_rows if self.good_rows is None else len(self.good_rows)


# input -> coordinator
class DataChecked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    sources: Annotated[tuple[SourceChecked, ...], Meta(max_length=64)]
    never_sampled: Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]
    stop_ids: Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]
    row_width: Count
    """Numbers in a pixel row (channels x temporal patch x patch x patch)."""

    def usable(self, source: str) -> tuple[int, ...] | int:
        """The rows of a source that may be used, ascending; a number n stands for 0 … n-1."""
        checked = next(item for item in self.sources if item.name == source)
        return checked.num_rows if checked.good_rows is None else checked.good_rows


# coordinator -> input: decode, patch, render and tokenize these rows in private memory. Answer: InputsSized.
class PrepareInputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    source: Name
    rows: Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]


# input -> coordinator: the inputs segment must have this size.
class InputsSized(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    size_bytes: Count
    prompts: Annotated[tuple[PromptSlot, ...], Meta(max_length=MAX_ITEMS)]


# coordinator -> input: write what was prepared for `step` into this segment. Answer: InputsWritten.
class WriteInputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    segment: SegmentRef


# input -> coordinator
class InputsWritten(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count


# coordinator -> input, now and then: what a few rows look like, for people. Answer: RowsShown, whatever is wrong with a
# row.
class ShowRows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    source: Name
    rows: Annotated[tuple[Count, ...], Meta(max_length=MAX_ROWS_SHOWN)]


class Thumbnail(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small picture of an image, or of a video's first frame."""

    name: Name
    """"image 1", "video 2": counted from 1 in each kind."""
    png: Annotated[bytes, Meta(max_length=65_536)] = b""
    """Empty: there is none."""
    width: Annotated[int, Meta(ge=0, le=256)] = 0
    height: Annotated[int, Meta(ge=0, le=256)] = 0
    problem: Text = ""
    """Why there is none."""


class RowShown(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row for people."""

    row: Count
    prompt: Text = ""
    """As rendered, one placeholder for each medium; cut where it is long."""
    media: Annotated[tuple[Thumbnail, ...], Meta(max_length=MAX_MEDIA_SHOWN)] = ()
    left_out: Count = 0
    """Media of the row beyond these."""
    problem: Text = ""
    """Why the row cannot be shown; then all else is empty."""


# input -> coordinator
class RowsShown(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    cause: Count
    step: Count
    rows: Annotated[tuple[RowShown, ...], Meta(max_length=MAX_ROWS_SHOWN)]


ToInput: TypeAlias = OpenData | PrepareInputs | WriteInputs | ShowRows | Leave
FromInput: TypeAlias = Received | Alive | Leaving | Failed | DataChecked | InputsSized | InputsWritten | RowsShown
