"""What a report says, to people and to programs."""

from __future__ import annotations

from rollplex.conformance.report import Report, Verdict, from_json, lines, to_json
from rollplex.protocol.common import Role

OK = Verdict(case="load", rule="it loads", passed=True)
BAD = Verdict(case="drain", rule="it drains", passed=False, got="a unit", needed="none")
AFTER = Verdict(case="leave", rule="it leaves", passed=False, reached=False, got="exit code 1")


def report(*verdicts: Verdict) -> Report:
    return Report(role=Role.ROLLOUT, command=("serve", "--fast"), verdicts=verdicts, log="one line\nthe last")


def test_a_report_passes_if_every_case_did_and_there_was_one() -> None:
    assert report(OK).passed
    assert not report(OK, BAD).passed
    assert not report(OK, AFTER).passed
    assert not report().passed


def test_a_failure_says_what_it_got_and_needed_and_what_was_not_reached() -> None:
    text = "\n".join(lines(report(OK, BAD, AFTER)))
    assert "conformance of rollout: serve --fast" in text
    assert "FAIL  drain" in text
    assert "got: a unit" in text
    assert "needed: none" in text
    assert "not reached: exit code 1" in text
    assert "does not conform: drain; 1 cases not reached" in text
    assert "the last" in text
    assert "conforms: all 1 cases" in "\n".join(lines(report(OK)))


def test_a_report_comes_back_from_its_json() -> None:
    assert from_json(to_json(report(OK, BAD, AFTER))) == report(OK, BAD, AFTER)
