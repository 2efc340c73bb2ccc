"""The report as text and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rollplex.cli.doctor import folder, gpu, libraries, outside, system
from rollplex.cli.doctor.finding import Finding, Verdict
from rollplex.config.environment import Environment


def examine(environment: Environment) -> list[Finding]:
    """Every check, in the order of the report, with the home directory written as ~."""
    return list(_shortened(_all(environment), environment.home))


def _all(environment: Environment) -> Iterator[Finding]:
    yield from libraries.check()
    yield from system.check(environment.shown)
    yield from folder.check(environment.runs_dir)
    yield from gpu.check()
    yield from outside.check()


def lines(findings: Sequence[Finding]) -> list[str]:
    """One line for each finding, what to do under it, and a last line with the result."""
    width = max(len(finding.topic) for finding in findings)
    found = []
    for finding in findings:
        found.append(f"{finding.verdict:<7}  {finding.topic:<{width}}  {finding.text}")
        if finding.do:
            found.append(f"{'':<7}  {'':<{width}}  -> {finding.do}")
    problems, notes = (sum(finding.verdict is kind for finding in findings) for kind in (Verdict.PROBLEM, Verdict.NOTE))
    return [*found, f"{_count(problems, 'problem')}, {_count(notes, 'note')}"]


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON list, for programs."""
    return json.dumps(msgspec.to_builtins(findings), indent=2)


def well(findings: Iterable[Finding]) -> bool:
    """Whether there is no problem."""
    return all(finding.verdict is not Verdict.PROBLEM for finding in findings)


def _shortened(findings: Iterable[Finding], home: Path | None) -> Iterator[Finding]:
    if home is None or home == Path("/"):
        yield from findings
        return
    pattern = re.compile(re.escape(str(home)) + r"(?=/|$|\W)")
    for finding in findings:
        yield replace(finding, text=pattern.sub("~", finding.text), do=pattern.sub("~", finding.do))


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
