"""Finding the reward functions that the user named: `package.module:function` or `path/to/file.py:function`.

Imports what is named and nothing else. A file is loaded under a name of its own, its folder is not put on the path.
Runs in the process of the user's functions.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

from rollplex.checkpoint.fingerprint import file_fingerprint
from rollplex.errors import RewardError
from rollplex.similar import closest

MAX_TRACE_CHARS = 4000
OUR_FOLDER = str(Path(__file__).parent)


def load_function(spec: str) -> Callable[..., object]:
    """Import one function.

    Raises:
        RewardError: a malformed name, a module that is absent or fails to import, no such function.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise RewardError(
            "This is not the name of a reward function",
            got=repr(spec),
            needed="package.module:function or path/to/file.py:function",
        )
    module = _load_file(Path(place), spec) if place.endswith(".py") else _import(place, spec)
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise RewardError(
            "There is no such function" if function is None else "This is not a function",
            got=repr(spec),
            needed=f"one of {', '.join(found[:20]) or 'none: the module has no functions'}",
            do=f"Did you mean {close}?" if (close := closest(name, found)) else "",
        )
    return cast("Callable[..., object]", function)


def source_fingerprint(spec: str, function: Callable[..., object]) -> str:
    """Of the file that `spec` names and, where it is another, of the one that the function was written in; "builtin" if
    neither was written in Python.

    A callable object or a decorated function has the file that made it, not the one where the user wrote it.
    """
    place = spec.rpartition(":")[0]
    module = sys.modules.get(place)
    named = place if place.endswith(".py") else str(getattr(module, "__file__", None) or "")
    try:
        written = inspect.getfile(inspect.unwrap(function))
    except (TypeError, ValueError):
        written = ""
    files = sorted({str(Path(file).absolute()) for file in (named, written) if file.endswith(".py")})
    digests = [file_fingerprint(Path(file)) for file in files if Path(file).is_file()]
    return "+".join(digests) or "builtin"


def short_trace(error: BaseException) -> str:
    """The error's sentence, then where in the user's code it was raised: our own frames left out, long texts cut."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OUR_FOLDER)]
    frames = [f for f in frames if not f.filename.startswith("<frozen importlib")]
    places, said = traceback.format_list(frames[-6:]), traceback.format_exception_only(error)
    if isinstance(error, SyntaxError):  # its place comes before its sentence
        first = next((index for index, line in enumerate(said) if not line.startswith(" ")), 0)
        places, said = [*places, *said[:first]], said[first:]
    sentence = "".join(said).strip()[: MAX_TRACE_CHARS // 2]
    return f"{sentence}\n{''.join(places).rstrip()[-MAX_TRACE_CHARS // 2 :]}".rstrip()


def _import(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise RewardError(
                "There is no such module",
                got=repr(spec),
                needed="a module on Python's path, or in the folder where the run was started",
                do="Set PYTHONPATH, or name a file: path/to/file.py:function.",
            ) from error
        raise _broken(spec, error) from error
    except BaseException as error:
        raise _broken(spec, error) from error


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise RewardError("There is no such file", got=repr(spec), needed="the path of a Python file")
    name = f"rollplex_reward_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None, f"{path} ends in .py"
    assert found.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _broken(spec, error) from error
    return module


def _broken(spec: str, error: BaseException) -> RewardError:
    return RewardError("The module of a reward function fails to import", got=short_trace(error), where=spec)
