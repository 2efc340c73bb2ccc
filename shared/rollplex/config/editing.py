"""Changes values in the text of a configuration, and nothing else: comments, order and quotes stay.

Whether the result says what was meant is checked by reading it again. Knows no keys of the configuration's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import yaml

from rollplex.config import yaml_text
from rollplex.errors import ConfigError


def set_numbers(text: str, section: str, values: Mapping[str, float], *, where: str) -> str:
    """The text with `section.key` set to a number, for each key; what is not there yet is put in.

    Args:
        text: a configuration that `yaml_text.parse` reads.
        where: file that errors name.

    Raises:
        ConfigError: the text is not such a one, or is written so that it has to be changed by hand.
    """
    before = yaml_text.parse(text, where=where).value
    wanted = dict(cast("dict[str, object]", before)) if isinstance(before, dict) else {}
    old = wanted.get(section)
    wanted[section] = {**(old if isinstance(old, dict) else {}), **values}
    changed = text
    try:
        for key, value in values.items():
            changed = _set(changed, section, key, repr(float(value)))
        after = yaml_text.parse(changed, where=where).value
    except (yaml.YAMLError, ConfigError):  # it could be read before
        after = None
    if after != wanted:
        raise _by_hand(section, values, where)
    return changed


def _set(text: str, section: str, key: str, value: str) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    inner = _find(root, section)
    if inner is None:
        end = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{end}{section}:\n  {key}: {value}\n"
    if not isinstance(inner, yaml.MappingNode):  # such as "device:" with nothing in it
        return text
    found = _find(inner, key)
    if found is not None:
        return text[: found.start_mark.index] + value + text[found.end_mark.index :]
    if inner.flow_style:
        at = inner.start_mark.index + 1
        return f"{text[:at]}{key}: {value}{', ' if inner.value else ''}{text[at:]}"
    last_key, last = inner.value[-1]
    column = last_key.start_mark.column
    if isinstance(last, yaml.ScalarNode) and last.style not in ("|", ">"):
        at = text.find("\n", last.end_mark.index)  # behind a comment on the same line
        at = len(text) if at < 0 else at
        return f"{text[:at]}\n{' ' * column}{key}: {value}{text[at:]}"
    at = last_key.start_mark.index  # where a nested value ends, comments of what follows may stand
    return f"{text[:at]}{key}: {value}\n{' ' * column}{text[at:]}"


def _find(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _by_hand(section: str, values: Mapping[str, float], where: str) -> ConfigError:
    keys = ", ".join(f"{section}.{key}: {value:g}" for key, value in values.items())
    return ConfigError("The configuration is written so that only you can change it", do=f"Set {keys}.", where=where)
