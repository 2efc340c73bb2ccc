#!/usr/bin/env python3
"""Prints what an image has to install, one requirement a line: pyproject.toml's dependencies, all or without some.

    python3 deploy/libraries.py [--without NAME]... [--extras "NAME NAME"] [--build]

Needs Python 3.11 and nothing else: it runs before anything is installed. Exact versions come from constraints/.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def libraries(project: Path, without: set[str], *, extras: Sequence[str] = (), build: bool = False) -> list[str]:
    """The dependencies in `project`, less those named in `without`.

    Args:
        extras: optional dependencies to list too.
        build: also what is needed to build the package itself.

    Raises:
        ValueError: a name in `without` is none of them, or one in `extras` is no extra.
    """
    content = tomllib.loads(project.read_text(encoding="utf-8"))
    by_name = {_name(requirement): requirement for requirement in content["project"]["dependencies"]}
    if unknown := without - by_name.keys():
        raise ValueError(f"not among the dependencies: {', '.join(sorted(unknown))}")
    wanted = [requirement for name, requirement in by_name.items() if name not in without]
    optional = content["project"]["optional-dependencies"]
    if strange := set(extras) - optional.keys():
        raise ValueError(f"no extra of the project: {', '.join(sorted(strange))}")
    wanted += [requirement for extra in extras for requirement in optional[extra]]
    return wanted + content["build-system"]["requires"] if build else wanted


def _name(requirement: str) -> str:
    match = _NAME.match(requirement)
    assert match, f"a requirement starts with a name; got {requirement!r}"
    return match[0]


def main() -> int:
    """0; 2 with a line on the standard error for a name that is no dependency."""
    parser = argparse.ArgumentParser(description="Print the requirements of an image.")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leave this one out")
    parser.add_argument("--extras", default="", metavar="NAMES", help="extras, separated by spaces")
    parser.add_argument("--build", action="store_true", help="also what building the package needs")
    args = parser.parse_args()
    try:
        lines = libraries(PROJECT, set(args.without), extras=args.extras.split(), build=args.build)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
