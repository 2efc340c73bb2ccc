"""What a conformance test found: a verdict for each case, as text and as JSON. No torch, no processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from rollplex.protocol.common import Role


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One case. Of one that passed `got` and `needed` are empty; of one that was not reached `got` says why."""

    case: str
    rule: str
    """What the protocol demands, in a sentence."""
    passed: bool
    reached: bool = True
    got: str = ""
    needed: str = ""

    def __str__(self) -> str:
        mark = "ok  " if self.passed else "FAIL" if self.reached else "    "
        line = f"{mark}  {self.case:<18}  {self.rule}"
        if self.passed:
            return line
        more = f"\n{'':26}got: {self.got}" if self.reached else f"\n{'':26}not reached: {self.got}"
        return line + more + (f"\n{'':26}needed: {self.needed}" if self.needed else "")


class Report(Struct, frozen=True, kw_only=True):
    """All verdicts on one program."""

    role: Role
    command: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    log: str = ""
    """The end of what the program wrote where it failed."""

    @property
    def passed(self) -> bool:
        """Whether it may take the service's place."""
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    @property
    def failures(self) -> tuple[Verdict, ...]:
        """Cases that were reached and failed."""
        return tuple(verdict for verdict in self.verdicts if verdict.reached and not verdict.passed)


def lines(report: Report) -> Iterator[str]:
    """The report for people."""
    yield f"conformance of {report.role}: {' '.join(report.command)}"
    yield from (str(verdict) for verdict in report.verdicts)
    if report.passed:
        yield f"conforms: all {len(report.verdicts)} cases"
        return
    names = ", ".join(verdict.case for verdict in report.failures)
    left = sum(not verdict.reached for verdict in report.verdicts)
    yield f"does not conform: {names}" + (f"; {left} cases not reached" if left else "")
    if report.log:
        yield "the end of what it wrote:"
        yield from (f"  {line}" for line in report.log.splitlines())


def to_json(report: Report) -> bytes:
    """The report as JSON, indented; `from_json` reads it."""
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


def from_json(content: bytes) -> Report:
    """Raises msgspec.MsgspecError if `content` is no report."""
    return msgspec.json.decode(content, type=Report)


def first_failure(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The first case that was reached and failed."""
    return next((verdict for verdict in verdicts if verdict.reached and not verdict.passed), None)
