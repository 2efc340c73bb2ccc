"""Finding the functions that the user named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollplex.checkpoint.fingerprint import file_fingerprint
from rollplex.errors import RewardError
from rollplex.rewards.loading import MAX_TRACE_CHARS, load_function, short_trace, source_fingerprint

Functions = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_of_a_module_is_found() -> None:
    assert load_function("json:dumps")([1]) == "[1]"
    assert load_function("os.path:basename")("a/b") == "b"


def test_a_function_of_a_file_is_found_and_its_folder_is_not_on_the_path(functions: Functions) -> None:
    path = functions("def f():\n    return 3\n")
    before = list(sys.path)
    assert load_function(f"{path}:f")() == 3
    assert load_function(f"{path}:f") is load_function(f"{path}:f")
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "not the name of a reward function"),
        ("json", "not the name of a reward function"),
        ("json:", "not the name of a reward function"),
        ("json:dumps()", "not the name of a reward function"),
        ("no_such_module_at_all:f", "no such module"),
        ("json.nothing:f", "no such module"),
        ("json:nothing", "no such function; got 'json:nothing'; needed one of .*dumps"),
        ("json:__doc__", "not a function"),
        ("/nowhere/f.py:f", "no such file"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_clearly(spec: str, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        load_function(spec)


def test_a_misspelt_function_gets_a_suggestion(functions: Functions) -> None:
    path = functions("def right(prompts): return [1.0]\ndef length(prompts): return [1.0]\n")
    with pytest.raises(RewardError) as caught:
        load_function(f"{path}:rihgt")
    assert caught.value.do == "Did you mean right?"
    with pytest.raises(RewardError) as caught:
        load_function(f"{path}:zzz")
    assert caught.value.do == ""


def test_a_failure_says_first_what_and_then_where(functions: Functions) -> None:
    path = functions("def f(x):\n    raise KeyError(x * 3000)\n")
    function = load_function(f"{path}:f")
    with pytest.raises(KeyError) as short:
        function("")
    assert short_trace(short.value).startswith("KeyError: ''\n  File ")
    assert short_trace(short.value).endswith("raise KeyError(x * 3000)")
    with pytest.raises(KeyError) as long:
        function("x")
    assert len(short_trace(long.value)) <= MAX_TRACE_CHARS
    assert "line 2, in f" in short_trace(long.value)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_thing\n", "No module named 'no_such_thing'"),
        ("def f(:\n", "SyntaxError"),
        ("x = 1\nraise KeyError('gone')\n", "line 2"),
        ("raise SystemExit(0)\n", "SystemExit"),
    ],
)
def test_a_file_that_fails_to_import_shows_where(code: str, says: str, functions: Functions) -> None:
    path = functions(code)
    with pytest.raises(RewardError, match=says) as caught:
        load_function(f"{path}:f")
    assert "fails to import" in caught.value.what
    assert not caught.value.got.startswith((" ", "File"))
    assert str(path) in str(caught.value)
    assert "rewards/loading.py" not in caught.value.got


def test_a_fingerprint_follows_the_file_that_the_user_named_whatever_kind_of_callable_it_holds(
    functions: Functions,
) -> None:
    text = "import functools\nclass Judge:\n    def __call__(self): return {n}\njudge = Judge()\n"
    text += "def plain(): return {n}\npartial = functools.partial(plain)\n"
    text += "def wrap(f):\n    import json\n    return json.JSONEncoder().encode\nwrapped = wrap(plain)\n"
    seen: dict[str, set[str]] = {}
    for number in range(2):
        path = functions(text.replace("{n}", str(number)))
        for name in ("judge", "plain", "partial", "wrapped"):
            spec = f"{path}:{name}"
            seen.setdefault(name, set()).add(source_fingerprint(spec, load_function(spec)))
    assert {name: len(found) for name, found in seen.items()} == dict.fromkeys(seen, 2)
    assert len(seen) == 4


def test_a_fingerprint_of_a_module_is_that_of_its_source() -> None:
    import json

    spec = "json:dumps"
    assert source_fingerprint(spec, load_function(spec)) == file_fingerprint(Path(json.__file__))
    assert source_fingerprint("builtins:len", len) == "builtin"
