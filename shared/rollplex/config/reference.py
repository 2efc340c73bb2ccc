"""docs/configuration.md, made from the sections themselves.

    python -m rollplex.config.reference docs/configuration.md      write it anew

Owns how a section becomes text: its docstring, its keys with kind, bounds and default, the sentence under a key. Knows
nothing of what keys mean, nor of the rules between them (`checks`).
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollplex.config.base import Size
from rollplex.config.config import Config

HEAD = """<!-- Made by: python -m rollplex.config.reference docs/configuration.md -->

# Configuration

One YAML file. Unknown keys are refused with a suggestion, values are not converted silently, relative paths are meant
from the file's own folder. Any key can be set for one run: `rollplex up my.yaml --set optimizer.lr=1e-6`. The run
directory's `config.yaml` has every key with the value that was used.

Rules between keys (a schedule that an option does not allow, sizes that do not divide) are checked before anything
starts; `rollplex up my.yaml --dry-run` also checks data, rewards and memory. Three keys are required: `model.path`,
`data.path` and `rewards.functions`.
"""
_LARGE = 2**20
_SIZE = 'bytes, such as `"8GiB"`'
_WORDS: Mapping[object, str] = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}


def reference() -> str:
    """The whole document."""
    return HEAD + "".join(f"\n{part}" for part in _parts(Config, ""))


def _parts(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            continue
        path = f"{prefix}{name}"
        rows = [_row(f"{path}.{key}", info) for key, info in section.model_fields.items() if not _is_inner(info)]
        text = " ".join((field.description or "").split())
        table = "\n".join(["| key | | default | |", "|---|---|---|---|", *rows]) + "\n" if rows else ""
        yield f"{'#' * (2 + path.count('.'))} {path}\n\n{text}{_how(field)}\n\n{table}"
        yield from _parts(section, f"{path}.")


def _how(field: FieldInfo) -> str:
    """Of a section that is a list, or that may be absent."""
    if _is_list(field.annotation):
        return " A list of:"
    return " Absent unless it is named." if type(None) in get_args(field.annotation) else ""


def _is_inner(field: FieldInfo) -> bool:
    """A section of its own, which gets its own table; a list of them is named in this one too."""
    return _section(field.annotation) is not None and not _is_list(field.annotation)


def _is_list(annotation: object) -> bool:
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return get_origin(inner) is tuple


def _section(annotation: object) -> type[BaseModel] | None:
    """The section in an annotation, wherever it is."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for item in get_args(annotation) if (found := _section(item)) is not None), None)


def _row(path: str, field: FieldInfo) -> str:
    is_size = any(item in get_args(Size)[1:] for item in field.metadata)
    words = (_SIZE,) if is_size else (_kind(field.annotation), _bounds(field.metadata))
    kind = ", ".join(filter(None, words))
    text = " ".join((field.description or "").split())
    return f"| `{path}` | {_cell(kind)} | {_cell(_default(field))} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    plain = value.value if isinstance(value, Enum) else value
    if isinstance(plain, float):
        return f"`{plain:g}`"
    return f"`{json.dumps(list(plain) if isinstance(plain, tuple) else plain)}`"


def _kind(annotation: object) -> str:
    """What may be written, in words."""
    if annotation == Size:
        return _SIZE
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in _FORMS:
        return _FORMS[origin](arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{item.value}`" for item in annotation)
    return "mapping" if _section(annotation) is not None else _WORDS[annotation]


def _annotated(arguments: tuple[Any, ...]) -> str:
    return ", ".join(filter(None, (_kind(arguments[0]), _bounds(arguments[1:]))))


def _alternatives(arguments: tuple[Any, ...]) -> str:
    return " or ".join(_kind(item) for item in arguments if item is not type(None))


_FORMS: Mapping[object, Callable[[tuple[Any, ...]], str]] = {
    Annotated: _annotated,
    Union: _alternatives,
    types.UnionType: _alternatives,
    Literal: lambda arguments: ", ".join(f"`{item}`" for item in arguments),
    tuple: lambda arguments: f"list of {_kind(arguments[0])}",
    dict: lambda _: "mapping",
}


def _bounds(metadata: Any) -> str:
    """Those of a number; of a text or list its length."""
    words = []
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=least):
                words.append(f"≥ {_number(least)}")
            case annotated_types.Gt(gt=least):
                words.append(f"> {_number(least)}")
            case annotated_types.Le(le=most):
                words.append(f"≤ {_number(most)}")
            case annotated_types.Lt(lt=most):
                words.append(f"< {_number(most)}")
            case FieldInfo():
                words.append(_bounds(item.metadata))
            case _:
                pass
    return " ".join(words)


def _number(bound: Any) -> str:
    if isinstance(bound, int) and bound >= _LARGE and bound.bit_count() == 1:
        return f"2^{bound.bit_length() - 1}"
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def main(argv: list[str]) -> int:
    """Write the document; 2 for a wrong call."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m rollplex.config.reference docs/configuration.md\n")
        return 2
    Path(argv[0]).write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
