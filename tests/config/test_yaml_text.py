"""YAML without surprises."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.config.yaml_text import MAX_TEXT_BYTES, dumps, parse
from rollplex.errors import ConfigError

_SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=20)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("true", True),
        ("1e-3", 1e-3),
        ("1.5e-3", 1.5e-3),
        ("5E2", 500.0),
        (".5", 0.5),
        ("-3", -3),
        ("007", 7),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-11-29", "2026-11-29"),
        ("0x10", "0x10"),
        ("-.inf", -math.inf),
        ("~", None),
        ("", None),
        ("'1e-3'", "1e-3"),
        ("<|im_end|>", "<|im_end|>"),
        ("=", "="),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = parse(text, where="x").value
    assert found == value
    assert type(found) is type(value)


@given(value=_VALUES)
@settings(max_examples=150, deadline=None)
def test_what_is_dumped_is_parsed_back_as_the_same_value(value: Any) -> None:
    assert parse(dumps(value), where="x").value == value


def test_texts_that_look_like_numbers_are_quoted_when_dumped() -> None:
    for text in ("1e-3", "no", "1:30", "2026-11-29", "~", "true", "0x10", "1_000", ".nan", "", "<<"):
        assert parse(dumps({"k": text}), where="x").value == {"k": text}


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "The key a is given twice"),
        ("a:\n  b: 1\n  b: 2\n", 3, "The key a.b is given twice"),
        ("a: &x 1\nb: *x\n", 1, "Anchors and aliases"),
        ("a: 1\nb: *x\n", 2, "Anchors and aliases"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "Tags are not supported"),
        ("a: !!binary aGk=\n", 1, "Tags are not supported"),
        ("a: !mine 1\n", 1, "Tags are not supported"),
        ("? [1, 2]\n: 1\n", 1, "A key must be a text"),
        ("a: 1\n b: 2\n", 2, "The text is not YAML"),
        ("a: 1\n\tb: 2\n", 2, "The text is not YAML"),
        ("a: 1\n---\nb: 2\n", 2, "The text is not YAML"),
        ("a: [1, 2\n", 2, "The text is not YAML"),
        ("a: " + "9" * 5000, 1, "too many digits"),
        ("[" * 100 + "]" * 100, 1, "nested too deeply"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(text: str, line: int, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        parse(text, where="job.yaml")
    assert caught.value.where == f"job.yaml:{line}"


def test_a_text_with_control_characters_or_of_a_huge_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="not YAML"):
        parse("a: \0", where="x")
    with pytest.raises(ConfigError, match="too large"):
        parse("a" * (MAX_TEXT_BYTES + 1), where="x")


def test_deep_nesting_ends_in_a_config_error_not_in_a_recursion_error() -> None:
    with pytest.raises(ConfigError):
        parse("[" * 100_000, where="x")


def test_lines_of_keys_are_remembered() -> None:
    document = parse("a:\n  b:\n    - 1\n    - c: 2\n", where="x")
    assert document.line(("a", "b", 1, "c")) == 4
    assert document.line(("a", "b", 0)) == 3
    assert document.line(("a", "nothing", "there")) == 1
    assert document.line(("z",)) is None
