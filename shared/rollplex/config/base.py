"""What every section of the configuration is made of: strict frozen models, byte sizes, paths.

Knows nothing of any particular key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B)", re.IGNORECASE | re.ASCII)
MAX_NUMBER = 1e300
"""The largest number that is no count and that the protocol carries."""
MAX_SIZE_BYTES = 2**53
"""The largest count that the protocol carries."""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions, no infinities."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _can_be_sent(cls, value: object) -> object:
        if isinstance(value, float) and abs(value) > MAX_NUMBER:
            raise ValueError(f"a number between {-MAX_NUMBER:g} and {MAX_NUMBER:g}")
        return value


def parse_size(value: object) -> object:
    """Bytes of a text such as "8GiB" (2^30), "512 MiB" or "2GB" (10^9); anything else is returned as it is.

    Raises:
        ValueError: a text that is not a size, or not a whole number of bytes.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError('a number of bytes, or a text such as "8GiB", "512MiB" or "2GB"')
    number, unit = match.groups()
    size = float(number) * _UNITS[unit.upper()] if "." in number else int(number) * _UNITS[unit.upper()]
    if size != int(size):
        raise ValueError("a whole number of bytes")
    return int(size)


def dataset_folder(path: Path) -> Path:
    """What the paths in a dataset are relative to, if nothing else is said: the folder of a file, or the folder."""
    return path if path.is_dir() else path.parent


def _against_base(path: Path, info: ValidationInfo) -> Path:
    """Relative paths are meant from the folder of the configuration file."""
    base = (info.context or {}).get("base")
    return path if base is None else (base / path).absolute()


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("a path; the text is empty")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a path without NUL characters")
    return value


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


def _file_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            "1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit "
            "(it is also the name of a file)"
        )
    return name


Size = Annotated[int, Field(ge=0, le=MAX_SIZE_BYTES), BeforeValidator(parse_size)]
"""A number of bytes; written as a whole number or as a text with a unit."""

FilePath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_against_base)]
"""A path; relative ones are meant from the folder of the configuration file."""

TokenText = Annotated[str, Field(min_length=1, max_length=4096)]
"""One token, as the tokenizer writes it."""

RunName = Annotated[str, AfterValidator(_file_name)]
"""A name that is also a file name: letters, digits, dot, dash, underscore; at most 64."""
