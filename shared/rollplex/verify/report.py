"""What one verification found: one group of the user's data, computed in several ways, and how far they lie apart.

Owns the file's form and its text. Does not know: how anything was computed, or which tolerance belongs to a dtype.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from rollplex.errors import DataError
from rollplex.whole_file import write_whole


class LogprobDifference(Struct, frozen=True, kw_only=True):
    """Log-probabilities of the same response tokens, computed in two ways."""

    largest: float | None
    """Largest absolute difference. None: it is not a finite number, which never passes."""
    tolerance: float
    sample: int
    """Of the largest difference: index within the group,"""
    position: int
    """and of the token within its response."""
    tokens: int
    """How many were compared."""
    beyond: int
    """How many of them differ by more than the tolerance, or are not finite."""

    @property
    def passed(self) -> bool:
        return self.tokens > 0 and self.beyond == 0


class GradientDifference(Struct, frozen=True, kw_only=True):
    """The summed gradient of every parameter, computed in two ways. A parameter's difference is max |a - b| divided by
    max |b|, where max |b| counts as at least a thousandth of that of all parameters together."""

    largest: float | None
    """Of the parameter that differs most. None: it is not a finite number, which never passes."""
    tolerance: float
    parameter: str
    """Its name, as transformers has it; empty if there is none."""
    parameters: int
    """How many were compared."""
    zero: int
    """How many of them are 0 everywhere in both ways: the vision tower's, if the row has no picture."""
    beyond: int
    """How many differ by more than the tolerance, or are not finite."""

    @property
    def passed(self) -> bool:
        return self.parameters > self.zero and self.beyond == 0


class Comparison(Struct, frozen=True, kw_only=True):
    """Two ways to compute the same."""

    name: str
    passed: bool
    logprobs: LogprobDifference | None
    gradients: GradientDifference | None


class Report(Struct, frozen=True, kw_only=True):
    """One verification."""

    passed: bool
    config: str
    data: str
    """The JSONL file."""
    row: int
    """Of it, from 0."""
    group_size: int
    prompt_tokens: int
    media: int
    """Images (or videos) of the prompt."""
    response_tokens: tuple[int, ...]
    dtype: str
    comparisons: tuple[Comparison, ...]


def read(file: Path) -> Report:
    """The report in a file.

    Raises:
        DataError: it is none.
        OSError: it cannot be read.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Report)
    except msgspec.DecodeError as error:
        raise DataError("This is no report of rollplex verify", got=str(error), where=str(file)) from error


def write(report: Report, file: Path) -> None:
    """Write a report, as a whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(file, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def lines(report: Report) -> list[str]:
    """The report in words, for a terminal."""
    shortest, longest = min(report.response_tokens), max(report.response_tokens)
    tokens = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
    media = f" with {report.media} image{'s' * (report.media > 1)}" if report.media else ""
    prompt = f"row {report.row} of {report.data}: a prompt of {report.prompt_tokens} tokens{media}"
    out = [
        f"{prompt}, {report.group_size} responses of {tokens} tokens, {report.dtype}",
        "",
        f"{'':<32}{'largest difference':>20}{'tolerance':>12}  where",
    ]
    for comparison in report.comparisons:
        out.append(comparison.name)
        if comparison.logprobs is not None:
            out.append(_row("log-probabilities", comparison.logprobs, _where_logprobs(comparison.logprobs)))
        if comparison.gradients is not None:
            out.append(_row("gradients", comparison.gradients, _where_gradients(comparison.gradients)))
    bad = [comparison.name for comparison in report.comparisons if not comparison.passed]
    out += ["", "verified: all within tolerance" if report.passed else f"NOT verified: {', '.join(bad)}"]
    if report.passed and report.dtype == "bfloat16":
        out.append("(bfloat16 shows gross errors only; `--set model.dtype=float32` is the sharp check)")
    return out


def _row(what: str, found: LogprobDifference | GradientDifference, where: str) -> str:
    largest = "not a number" if found.largest is None else f"{found.largest:.2g}"
    mark = "" if found.passed else "  BEYOND"
    return f"{'  ' + what:<32}{largest:>20}{found.tolerance:>12.2g}  {where}{mark}"


def _where_logprobs(found: LogprobDifference) -> str:
    beyond = f", {found.beyond} beyond" if found.beyond else ""
    return f"sample {found.sample}, token {found.position} ({found.tokens} tokens{beyond})"


def _where_gradients(found: GradientDifference) -> str:
    if found.parameters == found.zero:
        return f"nothing to compare: all {found.parameters} parameters have gradient 0"
    zero = f", {found.zero} of them 0 in both" if found.zero else ""
    beyond = f", {found.beyond} beyond" if found.beyond else ""
    return f"{found.parameter} ({found.parameters} parameters{zero}{beyond})"
