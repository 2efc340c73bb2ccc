"""`a.b=v` from the command line, put into what the file says. Knows nothing of the configuration's own keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.config.yaml_text import dotted, parse
from rollplex.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Override:
    """One `a.b=v`; `value` is read as YAML, whole numbers in the path index lists."""

    text: str
    path: tuple[str, ...]
    value: object

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"--set {self.text}"


def parse_override(text: str) -> Override:
    """Read one `a.b=v`.

    Raises:
        ConfigError: no `=`, an empty key, or a value that is not YAML.
    """
    left, equals, right = text.partition("=")
    path = tuple(part.strip() for part in left.split("."))
    if not equals or not all(path):
        raise ConfigError(
            "An override is not of the form a.b=value",
            got=repr(text),
            needed="a key path, =, and a value",
            do="For example --set run.seed=1.",
            where="--set",
        )
    return Override(text=text, path=path, value=parse(right, where=f"--set {left}").value)


def apply(value: object, overrides: Sequence[Override]) -> object:
    """The document with the overrides in it, in their order. The document itself is left as it is.

    Raises:
        ConfigError: a path that leads through a plain value, or to a list index that is not there.
    """
    for override in overrides:
        value = _put(value, override, 0)
    return value


def _put(value: object, override: Override, depth: int) -> object:
    if depth == len(override.path):
        return override.value
    part = override.path[depth]
    if isinstance(value, list):
        if not part.isascii() or not part.isdigit() or int(part) >= len(value):
            raise ConfigError(
                f"{dotted(override.path[:depth])} is a list",
                got=f"{part!r} as the index",
                needed=f"a number below {len(value)}" if value else "an index; the list is empty",
                do=f"Set the whole list: {dotted(override.path[:depth])}=[...].",
                where=override.where,
            )
        index = int(part)
        return [*value[:index], _put(value[index], override, depth + 1), *value[index + 1 :]]
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{dotted(override.path[:depth])} is a plain value and has no keys",
            got=repr(value),
            do="Set the key itself.",
            where=override.where,
        )
    return {**value, part: _put(value.get(part), override, depth + 1)}
