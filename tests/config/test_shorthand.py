"""An evaluation may be written without a list and without a name; errors speak of what was written."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config, dump, from_mapping, load
from rollplex.config.shorthand import as_written, name_of, written_out
from rollplex.config.yaml_text import dumps, parse
from rollplex.errors import ConfigError

Make = Callable[..., Config]
ONE = {"data": "other/rows.jsonl", "every": 50}


@pytest.fixture
def write(tmp_path: Path, config_file: Path, values: dict[str, Any]) -> Callable[..., Path]:
    """write(evaluation): the configuration file with this under `eval`."""

    def build(evaluation: object) -> Path:
        config_file.write_text(dumps({**values, "eval": evaluation}))
        return config_file

    return build


def test_one_evaluation_needs_neither_a_list_nor_a_name(write: Callable[..., Path]) -> None:
    (one,) = load(write(ONE)).eval
    assert (one.name, one.every, one.data.name) == ("rows", 50, "rows.jsonl")
    assert load(write(ONE)) == load(write([ONE])) == load(write([{"name": "rows", **ONE}]))


def test_the_resolved_configuration_shows_the_list_with_names(write: Callable[..., Path]) -> None:
    resolved = parse(dump(load(write(ONE))), where="resolved").value
    assert isinstance(resolved, dict)
    (one,) = resolved["eval"]
    assert one["name"] == "rows"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("data/held_out.jsonl", "held_out"),
        ("rows.v2.jsonl", "rows.v2"),
        ("my rows (new).jsonl", "my_rows_new_"),
        ("_hidden.jsonl", "hidden"),
        ("фото.jsonl", "eval"),
        ("x" * 90 + ".jsonl", "x" * 64),
        ("", "eval"),
    ],
)
def test_a_file_gives_a_name_that_is_accepted(make: Make, file: str, name: str) -> None:
    assert name_of(file) == name
    assert make(eval=[{"data": file or "x", "name": name}]).eval[0].name == name


def test_overrides_name_the_keys_as_they_are_written(write: Callable[..., Path]) -> None:
    assert load(write(ONE), ["eval.every=7"]).eval[0].every == 7
    assert load(write([ONE]), ["eval.0.every=7"]).eval[0].every == 7
    with pytest.raises(ConfigError) as caught:
        load(write(ONE), ["eval.every=-7"])
    assert caught.value.where == "--set eval.every=-7"


@pytest.mark.parametrize(
    ("evaluation", "what", "line", "key"),
    [
        ({**ONE, "evry": 3}, "Unknown key eval.evry", "evry", "eval.evry"),
        ({**ONE, "every": -3}, "eval.every has a value", "every", "eval.every"),
        ([{**ONE, "every": -3}], "eval.0.every has a value", "every", "eval.0.every"),
        ({"every": 3}, "The key eval.data is missing", "eval", "eval.data"),
        ({"data": "none.jsonl"}, "The dataset is not there", "data: none", "eval.data"),
        (3, "eval has a value that cannot be used", "eval", "eval"),
    ],
)
def test_errors_speak_of_what_was_written_and_of_its_line(
    write: Callable[..., Path], evaluation: object, what: str, line: str, key: str
) -> None:
    file = write(evaluation)
    with pytest.raises(ConfigError) as caught:
        load(file)
    number = 1 + [line in text for text in file.read_text().splitlines()].index(True)
    assert caught.value.what.startswith(what)
    assert caught.value.where == f"{file}:{number}: {key}"
    assert "also" not in caught.value.do


@pytest.mark.parametrize("names", [("a/rows.jsonl", "b/rows.jsonl"), ("train.jsonl",)])
def test_a_name_that_would_come_twice_is_refused_with_what_to_do(
    values: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({**values, "eval": [{"data": name} for name in names]})
    assert caught.value.where == "eval"
    assert "Set `name` in the entry of eval" in caught.value.do


def test_what_is_given_is_left_as_it_is(values: dict[str, Any]) -> None:
    before = deepcopy(values)
    values["eval"] = ONE
    assert written_out(values) == {**values, "eval": [{"name": "rows", **ONE}]}
    assert values == {**before, "eval": ONE}
    others: list[object] = [None, 3, [], {"eval": 3}, {"eval": [3]}, {"model": {}}]
    for other in others:
        assert written_out(other) == other


def test_only_the_index_of_a_list_that_was_not_written_is_left_out() -> None:
    assert as_written(("eval", 0, "every"), {"eval": {}}) == ("eval", "every")
    assert as_written(("eval", 0, "every"), {"eval": [{}]}) == ("eval", 0, "every")
    assert as_written(("rewards", "functions", 1, "weight"), {"eval": {}}) == ("rewards", "functions", 1, "weight")
