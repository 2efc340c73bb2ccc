"""Our three services conform; and whatever breaks one rule fails the case that has its name, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.conftest import HASTY, PATIENT, broken, ours
from rollplex.conformance import cases
from rollplex.conformance.drive import KITS, conformance
from rollplex.conformance.reading import READER
from rollplex.conformance.trainer import STANDING, UNLIKE
from rollplex.protocol.common import Role

LATE = ("handshake_refused", "received", "alive", "eof", "sigterm", "leave")
"""What is found out by waiting."""
EVERY_ROLE = ("rollout", "prefix", "trainer")
BROKEN = (
    ("tries_no_secret_again", "rollout", "handshake_secret"),
    ("insists", "rollout", "handshake_refused"),
    ("another_schema", "rollout", "hello"),
    ("another_name_for_messages", "rollout", "handshake"),
    ("tells_another_size", "rollout", "load"),
    ("shrugs_before_it_has_loaded", "rollout", "early"),
    ("late_received", "rollout", "received"),
    ("doubled_received", "rollout", "received"),
    ("no_alive", "rollout", "alive"),
    ("stands_still", "rollout", "alive"),
    ("answers_unasked", "rollout", "answers"),
    ("answers_twice", "rollout", "answers"),
    ("sends_what_cannot_be_read", "rollout", "frames"),
    ("does_it_again", "rollout", "doubled"),
    ("outlives_its_coordinator", "rollout", "eof"),
    ("deaf_to_term", "rollout", "sigterm"),
    ("leaves_without_waiting", "rollout", "sigterm"),
    ("leaves_a_child_with_its_stream", "rollout", "kill"),
    ("stays_after_leave", "rollout", "leave"),
    ("leaves_a_file", "rollout", "leftovers"),
    ("trusts_any_version", "rollout", "version"),
    ("reads_after_drain", "rollout", "drain"),
    ("another_version_drained", "rollout", "drained"),
    ("another_version_dropped", "rollout", "committed"),
    ("keeps_old_weights", "rollout", "fresh"),
    ("takes_more_than_its_lease", "rollout", "lease"),
    ("owns_up_to_more", "rollout", "held"),
    ("tells_another_digest", "rollout", "digest"),
    ("samples_elsewhere", "rollout", "on_policy"),
    ("samples_placeholders", "rollout", "vocabulary"),
    ("forgets_the_temperature", "rollout", "logprobs"),
    ("is_not_greedy", "rollout", "greedy"),
    ("knows_no_top_k", "rollout", "top_k"),
    ("stamps_another_version", "rollout", "versions"),
    ("withholds_a_group", "rollout", "groups"),
    ("reads_after_drain", "prefix", "drain"),
    ("trusts_any_version", "prefix", "version"),
    ("scores_without_temperature", "prefix", "scores"),
    ("forgets_the_values", "prefix", "keys_values"),
    ("loses_half_of_the_values", "prefix", "gradients"),
    ("never_clears_its_arena", "prefix", "fresh"),
    ("owns_up_to_more", "prefix", "held"),
    ("trusts_any_version", "trainer", "version"),
    ("digests_nothing", "trainer", "filled"),
    ("fills_what_stands", "trainer", "standing"),
    ("forgets_its_moments", "trainer", "standing"),
    ("trusts_any_digest", "trainer", "standing_refused"),
    ("trains_without_temperature", "trainer", "logprobs"),
    ("votes_for_everything", "trainer", "skip"),
    ("steps_too_early", "trainer", "vote"),
    ("steps_too_far", "trainer", "update"),
    ("publishes_another_digest", "trainer", "header"),
    ("forgets_the_sign", "trainer", "kv_gradients"),
    ("saves_other_weights", "trainer", "checkpoint"),
)


@pytest.mark.parametrize("role", EVERY_ROLE)
def test_our_services_conform(role: str, model: Path) -> None:
    report = conformance(Role(role), ours(role), limits=PATIENT, model=model)
    assert report.passed, [str(verdict) for verdict in report.verdicts if not verdict.passed] + [report.log]
    assert len({verdict.case for verdict in report.verdicts}) == len(report.verdicts) > 20


@pytest.mark.parametrize(("rule", "role", "case"), BROKEN, ids=lambda value: value)
def test_a_service_that_breaks_a_rule_fails_the_case_of_that_name(rule: str, role: str, case: str, model: Path) -> None:
    limits = HASTY if case in LATE else PATIENT
    report = conformance(Role(role), broken(rule, role), limits=limits, model=model, cases=[case])
    (failure,) = report.failures
    assert failure.case == case, report.log
    assert failure.got, "it says what it got"
    assert failure.needed, "and what it needed"


def test_every_rule_has_a_service_that_breaks_it() -> None:
    """A rule of two roles whose check is the same code has one of either."""
    shared = (*cases.REFUSED, *cases.BEGINNING, *cases.WIRE, *cases.ENDING, *cases.EARLY, *cases.VERSION, *cases.LEASE)
    alone = (*cases.DRAIN, *cases.DOUBLED, *cases.EOF, *cases.TERM, *cases.KILL, *STANDING, *UNLIKE)
    broken_ones = {(role, case) for _, role, case in BROKEN}
    assert {*shared, *alone} - {case for _, case in broken_ones} == set()
    for role, kit in KITS.items():
        rules = set(kit.rules) - ({*READER} if role is not Role.ROLLOUT else set())  # type: ignore[attr-defined]
        assert {case for case in rules if (role.value, case) not in broken_ones} == set(), role
