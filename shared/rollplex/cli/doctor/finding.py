"""What a check finds."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Verdict(StrEnum):
    """Whether somebody has to do something."""

    OK = "ok"
    NOTE = "note"
    """It runs, but with less than it could."""
    PROBLEM = "PROBLEM"
    """It will not run, or not reliably."""


class Finding(Struct, frozen=True, kw_only=True):
    """One line of the report."""

    topic: str
    text: str
    verdict: Verdict = Verdict.OK
    do: str = ""
    """What to do about it."""


def ok(topic: str, text: str) -> Finding:
    """All is well."""
    return Finding(topic=topic, text=text)


def note(topic: str, text: str, do: str = "") -> Finding:
    """Worth knowing."""
    return Finding(topic=topic, text=text, verdict=Verdict.NOTE, do=do)


def problem(topic: str, text: str, do: str) -> Finding:
    """To be mended."""
    return Finding(topic=topic, text=text, verdict=Verdict.PROBLEM, do=do)
