"""The reference part of docs/protocol.md, made from the message modules themselves.

    python -m rollplex.protocol.reference docs/protocol.md      rewrite the part between the markers
    python -m rollplex.protocol.reference --hashes              the schema hash of each role

Owns how a struct becomes text: the comment above it, its docstring, its fields with bounds and defaults, the sentence
under a field. Knows nothing of what messages mean.
"""

from __future__ import annotations

import ast
import importlib
import inspect as python_inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import inspect

from rollplex.protocol.common import Role
from rollplex.protocol.schema import PROTOCOL_VERSION, schema_hash

BEGIN = "<!-- begin of the generated reference: python -m rollplex.protocol.reference docs/protocol.md -->"
END = "<!-- end of the generated reference -->"
_COUNT = "int 0…2^53"
MODULES = ("handshake", "holder", "common", "rollout", "prefix", "trainer", "inputs", "reward")


@dataclass(frozen=True)
class Entry:
    """One struct or enum as its module writes it."""

    kind: type
    comment: str
    """The lines right above the class."""
    fields: dict[str, str]
    """Field name to the text under it."""


def reference() -> str:
    """The whole generated part, without the markers."""
    parts = [part for name in MODULES for part in _module(importlib.import_module(f"rollplex.protocol.{name}"))]
    return "\n".join(parts).strip()


def updated(document: str) -> str:
    """The document with its generated part made anew.

    Raises:
        ValueError: it has no markers.
    """
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


def entries(module: ModuleType) -> Iterator[Entry]:
    """The structs and enums that a module defines for the wire, in its order."""
    source = python_inspect.getsource(module)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and _on_the_wire(getattr(module, node.name)):
            yield Entry(getattr(module, node.name), _comment_above(lines, node.lineno), _field_texts(node))


def _on_the_wire(kind: type) -> bool:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_config__.forbid_unknown_fields
    return hasattr(kind, "__members__")


def _comment_above(lines: list[str], line: int) -> str:
    taken: list[str] = []
    for text in reversed(lines[: line - 1]):
        if not text.startswith("# ") or text.startswith("# ---"):
            break
        taken.insert(0, text[2:].strip())
    return " ".join(taken)


def _field_texts(node: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(value))):
                texts[name] = " ".join(value.split())
            case _:
                pass
    return texts


def _module(module: ModuleType) -> Iterator[str]:
    yield f"### `{module.__name__}`\n"
    yield python_inspect.cleandoc(module.__doc__ or "").split("\n\n")[0] + "\n"
    for entry in entries(module):
        yield f"#### `{entry.kind.__name__}`\n"
        doc = python_inspect.getdoc(entry.kind) if _own_doc(entry.kind) else ""
        for text in (entry.comment, " ".join((doc or "").split())):
            if text:
                yield text + "\n"
        yield _struct(entry) if issubclass(entry.kind, msgspec.Struct) else _enum(entry.kind)


def _own_doc(kind: type) -> bool:
    return bool(vars(kind).get("__doc__"))


def _enum(kind: Any) -> str:
    return "One of " + ", ".join(f'`"{member.value}"`' for member in kind) + ".\n"


def _struct(entry: Entry) -> str:
    info = inspect.type_info(entry.kind)
    assert isinstance(info, inspect.StructType), entry.kind
    rows = ["| field | type | |", "|---|---|---|"]
    for field in info.fields:
        default = "" if field.required else f", default `{_default(field)}`"
        rows.append(f"| `{field.name}` | {_type(field.type)}{default} | {entry.fields.get(field.name, '')} |")
    return "\n".join(rows) + "\n" if info.fields else "No fields.\n"


def _default(field: inspect.Field) -> str:
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return msgspec.json.encode(value).decode()


def _type(info: inspect.Type) -> str:
    match info:
        case inspect.StructType() | inspect.EnumType():
            return info.cls.__name__
        case inspect.UnionType():
            return " or ".join(_type(part) for part in info.types)
        case inspect.VarTupleType():
            return f"array of {_type(info.item_type)}{_at_most(info.max_length)}"
        case inspect.TupleType():
            return f"array [{', '.join(_type(item) for item in info.item_types)}]"
        case inspect.DictType():
            return f"map of {_type(info.key_type)} to {_type(info.value_type)}{_at_most(info.max_length)}"
        case _:
            return _scalar(info)


def _scalar(info: inspect.Type) -> str:
    match info:
        case inspect.IntType() | inspect.FloatType():
            name = "int" if isinstance(info, inspect.IntType) else "float"
            low = f">{info.gt:g}" if info.gt is not None else "" if info.ge is None else _number(info.ge)
            text = f"{name} {low}…{_number(info.le)}" if info.le is not None else name
            return "count" if text == _COUNT else text
        case inspect.StrType():
            return f"str{_at_most(info.max_length)}"
        case inspect.BytesType():
            return f"bin{_at_most(info.max_length)}"
        case inspect.BoolType():
            return "bool"
        case inspect.NoneType():
            return "nil"
        case _:
            msg = f"{info!r} has no text in the reference"
            raise TypeError(msg)


def _at_most(bound: int | None) -> str:
    return "" if bound is None else f" ≤ {_number(bound)}"


def _number(value: float) -> str:
    exponent = int(value).bit_length() - 1
    if exponent >= 16 and value == 2**exponent:
        return f"2^{exponent}"
    return str(int(value)) if value == int(value) and abs(value) < 2**31 else f"{value:g}"


def main(arguments: list[str]) -> int:
    """Command line; see the module's docstring."""
    match arguments:
        case ["--hashes"]:
            lines = [f"{role:<8} {schema_hash(role)}" for role in Role]
            sys.stdout.write("\n".join([f"protocol {PROTOCOL_VERSION}", *lines]) + "\n")
        case [path]:
            document = Path(path)
            document.write_text(updated(document.read_text(encoding="utf-8")), encoding="utf-8")
        case _:
            sys.stderr.write("usage: python -m rollplex.protocol.reference docs/protocol.md | --hashes\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
