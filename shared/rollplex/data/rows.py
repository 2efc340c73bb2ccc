"""Rows of a dataset: raw ones of any format (`stores`) and any shape (`shapes`), made uniform and checked strictly.

    prompt      text, or a conversation: [{"role": …, "content": text or parts}, …]           required
    images      places of images, in the order of their placeholders                          optional
    videos      for each video its file, or its frames                                        optional
    columns     what goes to the reward functions: all of the row but the prompt, and what
                the shape adds under the name that such functions know

Owns the form of a row. Does not know image files, templates or tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollplex.data.columns import columns_of
from rollplex.data.format_prompt import FormatPrompt
from rollplex.data.media import Place, Video, images_of, videos_of
from rollplex.data.messages import Messages, checked_prompt
from rollplex.data.renames import rename_to
from rollplex.data.shapes.base import IMAGE_COLUMNS, VIDEO_COLUMNS, Shape
from rollplex.data.shapes.factory import COLUMNS, shape_of
from rollplex.data.shapes.trl import TRL
from rollplex.data.stores.base import RawRow, decode_object
from rollplex.data.stores.factory import open_store
from rollplex.errors import ConfigError, DataError
from rollplex.protocol.inputs import DataSource, ShapeName
from rollplex.similar import closest

RESERVED = ("prompts", "completions", "completion_ids")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row, its form checked."""

    number: int
    prompt: str | Messages
    images: tuple[Place, ...]
    videos: tuple[Video, ...]
    columns: dict[str, object]
    """For the reward functions."""


class Rows:
    """A dataset, open.

    Args:
        path: a file or a folder.
        split: of a folder that has several.
        shape: whose rows they are.
        columns: names that the shape knows, each with the column that is meant.
        format_prompt: jinja2 around each question; empty: none.
        binary: False: values that are bytes may be left out; for the reward functions, which do not get them.

    Raises:
        DataError: it cannot be opened, has no rows, or its first row is of no known shape.
        ConfigError: a package is not installed, or `columns` or `format_prompt` cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        split: str = "",
        shape: ShapeName = ShapeName.AUTO,
        columns: Mapping[str, str] | None = None,
        format_prompt: str = "",
        binary: bool = True,
    ) -> None:
        names = dict(columns or {})
        _check_names(names)
        self._format = FormatPrompt(format_prompt) if format_prompt else None
        self._store = open_store(path, split, binary=binary)
        self.columns: tuple[str, ...] = ()
        self._form = _Form(self._recognise(shape, names), names, self._format)

    @classmethod
    def of(cls, source: DataSource, *, binary: bool = True) -> Rows:
        """The dataset that a message describes."""
        return cls(
            Path(source.path),
            split=source.split,
            shape=source.shape,
            columns=source.columns,
            format_prompt=source.format_prompt,
            binary=binary,
        )

    def __len__(self) -> int:
        return len(self._store)

    @property
    def digest(self) -> bytes:
        """32 bytes: of the rows' content, and of what is put around their questions."""
        if self._format is None:
            return self._store.digest
        return hashlib.blake2b(self._store.digest + self._format.source.encode(), digest_size=32).digest()

    @property
    def format(self) -> str:
        """In words: "JSON lines"."""
        return self._store.form

    @property
    def shape(self) -> Shape:
        """Whose rows they are."""
        return self._form.shape

    def close(self) -> None:
        self._store.close()

    def where(self, number: int) -> str:
        """A row as errors name it."""
        return self._store.where(number)

    def row(self, number: int) -> Row:
        """Read and check one row. Raises DataError naming the file and the row."""
        fields = self._store.raw(number)
        try:
            return self._form.row(fields, number)
        except DataError as error:
            raise located(error, self.where(number)) from error

    def for_rewards(self, number: int) -> bytes:
        """The prompt and the columns of a row, as reward functions get them: JSON, an object.

        Values that are bytes are null in it. Raises DataError naming the file and the row.
        """
        fields = self._store.raw(number)
        try:
            return msgspec.json.encode(self._form.for_rewards(fields))
        except DataError as error:
            raise located(error, self.where(number)) from error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            what = "This row cannot be given to a reward function"
            raise DataError(what, got=str(error), where=self.where(number)) from error

    def _recognise(self, shape: ShapeName, names: Mapping[str, str]) -> Shape:
        """By the first row that can be read. If none can, TRL's: each row is an error of its own."""
        for number in range(len(self._store)):
            try:
                fields = self._store.raw(number)
            except DataError:
                continue
            self.columns = tuple(fields)
            try:
                return _shape_of(fields, shape, names)
            except DataError as error:
                raise located(error, self.where(number)) from error
        return TRL


def located(error: DataError, where: str) -> DataError:
    """The same error, with the row in front of whatever place it named."""
    place = f"{where}: {error.where}" if error.where else where
    return DataError(error.what, got=error.got, needed=error.needed, do=error.do, where=place)


def parse(line: bytes, number: int) -> Row:
    """Check one line of JSON in TRL's shape. Raises DataError that says what is wrong, not where."""
    return _Form(TRL, {}, None).row(decode_object(line, "line"), number)


class _Form:
    """How the raw rows of one dataset are read.

    Args:
        shape: whose they are.
        names: that the shape knows, each with the column that is meant.
        prompt_format: put around each question.
    """

    def __init__(self, shape: Shape, names: Mapping[str, str], prompt_format: FormatPrompt | None) -> None:
        self.shape = shape
        self._names = dict(names)
        self._format = prompt_format

    def row(self, fields: RawRow, number: int) -> Row:
        view = viewed(fields, self._names)
        images, videos = _column(view, IMAGE_COLUMNS), _column(view, VIDEO_COLUMNS)
        return Row(
            number=number,
            prompt=self._prompt(view),
            images=images_of(view.get(images), self._name(images)),
            videos=videos_of(view.get(videos), self._name(videos), view.get("video_fps")),
            columns=self._columns(view, fields),
        )

    def for_rewards(self, fields: RawRow) -> dict[str, object]:
        view = viewed(fields, self._names)
        return {"prompt": self._prompt(view), **_without_bytes(self._columns(view, fields))}

    def _prompt(self, view: RawRow) -> str | Messages:
        for name in self.shape.needs:
            if view.get(name) is None:
                raise DataError(
                    f'This row has no "{self._name(name)}"',
                    got=f"columns {', '.join(sorted(view)) or 'none'}",
                    needed=f'"{self._name(name)}", as all rows of the shape {self.shape.name} have it',
                    do=rename_to(view, name),
                )
        prompt = checked_prompt(self.shape.to_prompt(view[self.shape.prompt]))
        return self._format.prompt(prompt) if self._format is not None else prompt

    def _columns(self, view: RawRow, fields: RawRow) -> dict[str, object]:
        for name in RESERVED:
            if name in fields:
                raise DataError(
                    f"A column is called {name!r}", needed="another name; reward functions get this one anyway"
                )
        return {**self.shape.more(view), **columns_of(fields)}

    def _name(self, known: str) -> str:
        """What the file calls it."""
        return self._names.get(known, known)


def viewed(fields: RawRow, names: Mapping[str, str]) -> RawRow:
    """A row under the names that a shape knows: each of `names` stands for its column, which then has no other name."""
    if not names:
        return fields
    hidden = {*names, *names.values()}
    view = {name: value for name, value in fields.items() if name not in hidden}
    return view | {known: fields[column] for known, column in names.items() if column in fields}


def _check_names(columns: Mapping[str, str]) -> None:
    for known in columns:
        if known not in COLUMNS:
            close = closest(known, COLUMNS)
            raise ConfigError(
                "data.columns has a name that no shape knows",
                got=known,
                needed=", ".join(COLUMNS),
                do=f"Did you mean {close}?" if close else "",
                where="data.columns",
            )


def _shape_of(fields: RawRow, shape: ShapeName, names: Mapping[str, str]) -> Shape:
    for known, column in names.items():
        if column not in fields:
            raise DataError(
                "data.columns names a column that the rows lack",
                got=f"{known}: {column}",
                needed=f"one of {', '.join(sorted(fields)) or 'none'}",
            )
    view = viewed(fields, names)
    return shape_of([column for column, value in view.items() if value is not None], shape)


def _column(view: RawRow, names: tuple[str, ...]) -> str:
    """Which of these columns holds something; the first if none does."""
    held = [name for name in names if view.get(name) is not None]
    if len(held) > 1:
        raise DataError(f'This row has both "{held[1]}" and "{held[0]}"', needed="one of them")
    return held[0] if held else names[0]


def _without_bytes(value: dict[str, object]) -> dict[str, object]:
    def plain(item: object) -> object:
        match item:
            case bytes():
                return None
            case dict():
                return {key: plain(part) for key, part in item.items()}
            case list() | tuple():
                return [plain(part) for part in item]
            case _:
                return item

    return {name: plain(item) for name, item in value.items()}
