"""YAML for configurations: the core schema of YAML 1.2, without surprises.

`no` is a text, `1e-3` a number, `1:30` and `2026-11-29` texts; a key given twice is an error, and so are anchors and
tags. Remembers the line of each key. Knows nothing of the configuration's own keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from rollplex.errors import ConfigError

MAX_TEXT_BYTES = 2**20
MAX_DEPTH = 64

Key = str | int
_RESOLVERS = (
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), "tf"),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), "~n"),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"),
        "-+0123456789.",
    ),
)


class _Loader(yaml.SafeLoader):
    """Composes nodes; values are made by `_value`, never by a constructor."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own class attribute


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 (its parent) or the core schema would read as something other than a text."""

    yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()}  # noqa: RUF012


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, [*_first, ""] if _tag.endswith("null") else list(_first))


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed text: its value, and on which line (from 1) each key path stands."""

    value: object
    lines: dict[tuple[Key, ...], int]

    def line(self, path: Sequence[Key]) -> int | None:
        """Line of the longest part of `path` that the text has; None if it has none of it."""
        for length in range(len(path), 0, -1):
            if (line := self.lines.get(tuple(path[:length]))) is not None:
                return line
        return None


def parse(text: str, *, where: str) -> Document:
    """Read one YAML document.

    Args:
        where: file or argument that errors name; the line is added.

    Raises:
        ConfigError: not YAML, more than one document, or something that is refused (see the module).
    """
    if len(text.encode("utf-8", "surrogateescape")) > MAX_TEXT_BYTES:
        raise ConfigError("The configuration is too large", needed=f"at most {MAX_TEXT_BYTES:,} bytes", where=where)
    try:
        _refuse_anchors(text, where)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _not_yaml(error, where) from None
    lines: dict[tuple[Key, ...], int] = {}
    return Document(value=None if node is None else _value(node, (), lines, where), lines=lines)


def dumps(value: object) -> str:
    """YAML text that `parse` reads back as the same value; keys keep their order."""
    # Escaped, because PyYAML reads a plain U+0085 in quotes back as a space.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=100)


def _refuse_anchors(text: str, where: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        place = f"{where}:{event.start_mark.line + 1}" if event.start_mark is not None else where
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(
                "The configuration is nested too deeply",
                needed=f"at most {MAX_DEPTH} levels",
                where=place,
            )
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise ConfigError(
                "Anchors and aliases are not supported",
                got=repr(event.anchor),
                do="Write the value out.",
                where=place,
            )


def _not_yaml(error: yaml.YAMLError, where: str) -> ConfigError:
    problem = "The text is not YAML"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = f"{where}:{error.problem_mark.line + 1}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        problem += f": {error.problem}"
    elif isinstance(error, yaml.reader.ReaderError):
        problem += f": {error.reason}"
    return ConfigError(
        problem, do="Indent with spaces, and quote texts that contain ': ' or begin with % @ ` [ {.", where=where
    )


def _value(node: yaml.Node, path: tuple[Key, ...], lines: dict[tuple[Key, ...], int], where: str) -> object:
    place = f"{where}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _mapping(node, path, lines, where)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        values: list[object] = []
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            values.append(_value(item, (*path, index), lines, where))
        return values
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, place)
    raise ConfigError("Tags are not supported", got=node.tag, do="Write the value without a tag.", where=place)


def _mapping(
    node: yaml.MappingNode, path: tuple[Key, ...], lines: dict[tuple[Key, ...], int], where: str
) -> dict[str, object]:
    found: dict[str, object] = {}
    for key_node, value_node in node.value:
        place = f"{where}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError("A key must be a text", got="a list or a mapping", where=place)
        key = key_node.value
        here = (*path, key)
        if key in found:
            first = lines[here]
            raise ConfigError(
                f"The key {dotted(here)} is given twice",
                got=f"it again; first on line {first}",
                do="Take one out.",
                where=place,
            )
        lines[here] = key_node.start_mark.line + 1
        found[key] = _value(value_node, here, lines, where)
    return found


def _scalar(node: yaml.ScalarNode, place: str) -> object:
    text: str = node.value
    match node.tag.removeprefix("tag:yaml.org,2002:"):
        case "str":
            return text
        case "bool":
            return text == "true"
        case "null":
            return None
        case "int":
            return _whole(text, place)
        case "float":
            return _float(text)
        case _:
            raise ConfigError("Tags are not supported", got=node.tag, do="Write the value without a tag.", where=place)


def _whole(text: str, place: str) -> int:
    if len(text) > 32:
        raise ConfigError("A number has too many digits", got=text[:40], needed="at most 32", where=place)
    return int(text)


def _float(text: str) -> float:
    if text.endswith(".inf"):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if text == ".nan" else float(text)


def dotted(path: Sequence[Key]) -> str:
    """A key path as users write it: rewards.functions.0.weight."""
    return ".".join(str(part) for part in path)
