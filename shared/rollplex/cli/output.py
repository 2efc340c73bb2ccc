"""How commands print."""

from __future__ import annotations


def say(line: str) -> None:
    """One line on the standard output, at once."""
    print(line, flush=True)
