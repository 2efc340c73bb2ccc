from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollplex.errors import WaitError
from rollplex.journal.events import WorkersRestarting
from rollplex.protocol.common import ErrorReport, Role
from rollplex_coordinator.http.metrics import Metrics
from support.http_site import Site, fill

MakeSite = Callable[..., "Site"]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(client: httpx.Client) -> Samples:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, /, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_the_core_is_shown_as_it_stands(make_site: MakeSite) -> None:
    with make_site().client() as client:
        samples = scrape(client)
    assert value(samples, "rollplex_core_answers") == 1
    assert value(samples, "rollplex_run_info", run="r1", schedule="overlap") == 1
    assert value(samples, "rollplex_phase", phase="ROLLOUT") == 1
    assert sum(v for (name, _), v in samples.items() if name == "rollplex_phase") == 1
    assert value(samples, "rollplex_weights_version") == 4
    assert value(samples, "rollplex_iterations_wanted") == 10
    assert value(samples, "rollplex_oldest_wait_seconds") == 1.5
    assert value(samples, "rollplex_budget_bytes", device="0:0") == 128
    assert value(samples, "rollplex_leased_bytes", device="0:0") == 64
    assert value(samples, "rollplex_peak_bytes", device="0:0") == 96
    assert value(samples, "rollplex_lease_bytes", device="0:0", kind="actor_weights", owner="trainer") == 64
    assert value(samples, "rollplex_held_bytes", device="0:0", kind="actor_weights", owner="trainer") == 60
    assert value(samples, "rollplex_lease_requests_waiting") == 1
    assert value(samples, "rollplex_service_up", service="trainer[0:0]", role="trainer", device="0:0") == 1
    assert value(samples, "rollplex_service_up", service="prefix[0:0]", role="prefix", device="0:0") == 0
    assert value(samples, "rollplex_service_incarnation", service="prefix[0:0]") == 2
    assert value(samples, "rollplex_tracker_up", tracker="wandb") == 1
    assert value(samples, "rollplex_tracker_dropped_rows", tracker="wandb") == 3
    assert value(samples, "process_open_fds") > 0


def test_the_journal_is_counted_once_however_often_it_is_scraped(make_site: MakeSite) -> None:
    site = make_site()
    fill(site)
    with site.client() as client:
        scrape(client)
        samples = scrape(client)
        assert value(samples, "rollplex_events_total", type="UnitDone") == 2
        assert value(samples, "rollplex_unit_seconds_count", kind="generate") == 2
        assert value(samples, "rollplex_unit_seconds_sum", kind="generate") == 3.0
        assert value(samples, "rollplex_unit_seconds_bucket", kind="generate", le="1.0") == 1
        assert value(samples, "rollplex_vision_prompts_total", kind="generate") == 6
        assert value(samples, "rollplex_responses_total") == 3
        assert value(samples, "rollplex_response_tokens_total") == 21
        assert value(samples, "rollplex_update_seconds_sum") == 0.25
        assert value(samples, "rollplex_iteration_metric", name="reward") == 0.25
        assert value(samples, "rollplex_iteration_metric", name="kl") != value(
            samples, "rollplex_iteration_metric", name="kl"
        ), "a number that is not finite"
        assert value(samples, "rollplex_eval_metric", eval="held-out", name="accuracy") == 0.9
        assert value(samples, "rollplex_errors_total", kind="RewardError") == 1
        assert value(samples, "rollplex_journal_unread_events") == 0
        fill(site)
        assert value(scrape(client), "rollplex_events_total", type="UnitDone") == 4


def test_requests_are_counted_by_method_and_status(make_site: MakeSite) -> None:
    site = make_site()
    with site.client() as client:
        client.get("/status")
        client.get("/nowhere")
        client.request("QUERY", "/status")
        httpx.get(site.server.url + "/status")
        samples = scrape(client)
    for method, status in (("GET", "200"), ("GET", "404"), ("GET", "401"), ("other", "405")):
        assert value(samples, "rollplex_http_requests_total", method=method, status=status) == 1


def test_a_core_that_does_not_answer_is_shown_and_the_rest_too(make_site: MakeSite) -> None:
    site = make_site()
    fill(site)
    site.control.error = WaitError("the core did not answer")
    with site.client() as client:
        samples = scrape(client)
    assert value(samples, "rollplex_core_answers") == 0
    assert value(samples, "rollplex_responses_total") == 3
    assert not [name for name, _ in samples if name == "rollplex_weights_version"]


def test_a_long_journal_is_read_over_several_scrapes(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplex_coordinator.http.metrics.MAX_EVENTS", 4)
    monkeypatch.setattr("rollplex_coordinator.http.metrics._BATCH", 2)
    site = make_site()
    fill(site)
    with site.client() as client:
        assert value(scrape(client), "rollplex_journal_unread_events") == 3
        assert value(scrape(client), "rollplex_journal_unread_events") == 0


def test_a_journal_that_cannot_be_read_is_shown_and_the_rest_too(make_site: MakeSite) -> None:
    site = make_site()
    metrics = Metrics(site.journal.path.with_name("nowhere"))
    assert b"rollplex_journal_readable 0.0" in metrics.render(site.control)
    assert b"rollplex_core_answers 1.0" in metrics.render(site.control)
    assert b"rollplex_journal_readable 1.0" in Metrics(site.journal.path).render(site.control)


def test_restarts_are_counted_by_whose_end_was_the_reason(make_site: MakeSite) -> None:
    site = make_site()
    for number, role in enumerate((Role.ROLLOUT, None, Role.ROLLOUT), start=1):
        error = ErrorReport(kind="ServiceDied", what="it died")
        site.journal.append(
            WorkersRestarting(
                number=number, allowed=3, service="", role=role, error=error, phase="TRAIN", version=number
            )
        )
    site.journal.flush()
    with site.client() as client:
        samples = scrape(client)
    assert value(samples, "rollplex_restarts_total", role="rollout") == 2
    assert value(samples, "rollplex_restarts_total", role="mps") == 1
