"""The dashboard in a browser: a live node from login to stop, a death that is told, a phone, a keyboard.

One node and one page for all of it, in order; the named error needs no node.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollplex.journal.events import ErrorRaised, RunStarted, ServiceDied
from rollplex.protocol.common import ErrorReport, Role
from rollplex_coordinator.http.views import StatusView, SwapView, TrackerView
from support.browser import axe_findings, browser, missing
from support.http_site import QUICK, TOKEN, FakeControl, Site
from support.nodes import Node, Start

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(bool(missing()), reason=missing() or "all is there"),
]
WAIT_MS = 30_000
LIVE_PHASE = "#phase:not([data-phase='']):not([data-phase=IDLE]):not([data-phase=LOAD])"


class Seen:
    """A page, and what its console said."""

    def __init__(self, chromium: Any, url: str, *, width: int = 1280, scheme: str = "light") -> None:
        self.context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.problems: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(url)

    def _said(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.problems.append(message.text)

    def login(self, token: str) -> None:
        self.page.fill("#token", token)
        self.page.click("text=Log in")


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} within {seconds:g} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def node(start: Start) -> Node:
    return start("--serve", overrides={"run.sample_every": 1})


@pytest.fixture(scope="module")
def api(node: Node) -> Iterator[httpx.Client]:
    with node.api() as client:
        node.until(lambda: client.get("/status").json()["phase"] == "IDLE", "the loaded node")
        yield client


@pytest.fixture(scope="module")
def seen(chromium: Any, api: httpx.Client) -> Seen:
    return Seen(chromium, str(api.base_url))


@pytest.fixture(scope="module")
def token(api: httpx.Client) -> str:
    return api.headers["Authorization"].partition(" ")[2]


def test_a_wrong_token_is_refused_and_shows_nothing(seen: Seen) -> None:
    seen.login("x" * 43)
    until(lambda: "not the run's token" in seen.page.inner_text("#login-error"), "refusal")
    assert seen.page.is_hidden("#live")
    assert [text for text in seen.problems if "401" not in text] == []  # the browser itself notes the refusal
    seen.problems.clear()
    assert axe_findings(seen.page) == []


def test_the_right_token_shows_the_run_and_stays_in_memory_alone(seen: Seen, token: str, api: httpx.Client) -> None:
    seen.login(token)
    seen.page.wait_for_selector("#phase[data-phase=IDLE]")
    until(lambda: seen.page.inner_text("#link-text") == api.get("/status").json()["run"], "the run's name")
    assert token not in seen.page.url
    assert token not in seen.page.content()
    assert seen.page.input_value("#token") == ""
    assert seen.context.cookies() == []
    assert seen.page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]


def test_iterations_that_are_started_change_the_phase_and_are_drawn(seen: Seen, api: httpx.Client) -> None:
    seen.page.fill("#count", "4")
    seen.page.click("#start")
    seen.page.wait_for_selector(LIVE_PHASE)
    until(lambda: api.get("/status").json()["iterations_done"] == 4, "four iterations", 90)
    seen.page.wait_for_selector("#phase[data-phase=IDLE]")
    until(lambda: seen.page.inner_text("#goal-done") == "4", "the count")
    kinds = {"prefill", "decode", "reference_prefix", "actor_prefix", "score", "suffix", "prefix_backward", "optimizer"}
    assert kinds <= set(re.findall(r"k-(\w+)", seen.page.inner_html("#lanes svg")))
    labels = seen.page.locator("#lanes svg text.name").all_text_contents()
    assert {"rollout", "prefix", "trainer", "rewards"} <= {label.strip() for label in labels}
    until(lambda: seen.page.locator("#curves .curve").count() == 8, "curves")
    reward = json.loads((Path(api.get("/runs").json()[0]["folder"]) / "metrics.jsonl").read_text().splitlines()[-1])[
        "reward"
    ]
    until(lambda: f"{reward:.3g}"[:4] in seen.page.inner_text("[data-name=reward] b"), "the last reward")
    services = seen.page.inner_text("#services")
    assert all(f"{role}[0:0]" in services for role in ("trainer", "prefix", "rollout", "input", "reward"))


def test_bars_of_memory_add_up_to_the_ledger(seen: Seen, api: httpx.Client) -> None:
    ledger = api.get("/ledger").json()
    (device,) = ledger["devices"]
    place = seen.page.locator(f"[data-device='{device['device']}']")
    until(lambda: place.get_attribute("data-sum-bytes") == str(device["leased_bytes"]), "the ledger's sum")
    drawn = {
        bar.get_attribute("data-kind"): int(bar.get_attribute("data-bytes"))
        for bar in place.locator("rect[data-kind]").all()
    }
    wanted: dict[str, int] = {}
    for lease in ledger["leases"]:
        wanted[lease["kind"]] = wanted.get(lease["kind"], 0) + lease["size_bytes"]
    assert drawn == wanted
    assert sum(drawn.values()) == device["leased_bytes"]
    widths = [float(bar.get_attribute("width").rstrip("%")) for bar in place.locator("rect[data-kind]").all()]
    shares = [count / sum(drawn.values()) for count in drawn.values()]
    assert [width / sum(widths) for width in widths] == pytest.approx(shares)


def test_a_samples_picture_opens_large_and_closes_by_keyboard(seen: Seen) -> None:
    seen.page.wait_for_selector("#samples .pictures img[src^=blob]")
    seen.page.locator("#samples .pictures button").first.click()
    seen.page.wait_for_selector("#viewer[open] img")
    until(lambda: seen.page.evaluate("document.querySelector('#viewer img').naturalWidth") > 0, "the picture")
    seen.page.keyboard.press("Escape")
    seen.page.wait_for_selector("#viewer:not([open])", state="attached")


def test_history_shows_this_run_its_timeline_and_its_samples(seen: Seen) -> None:
    seen.page.click("#to-history")
    seen.page.locator("#runs tbody a").first.click()
    seen.page.wait_for_selector("#one-lanes svg rect.k-decode")
    seen.page.wait_for_selector("#compare-curves .curve canvas")
    until(lambda: seen.page.locator("#found .sample").count() > 0, "samples")
    seen.page.fill("#find-from", "1")
    seen.page.fill("#find-to", "1")
    seen.page.click("text=Search")
    headings = seen.page.locator("#found .sample h3")
    until(lambda: {text.split(",")[0] for text in headings.all_inner_texts()} == {"Step 1"}, "samples of step 1")
    seen.page.fill("#find-low", "1000000")
    seen.page.click("text=Search")
    until(lambda: headings.count() == 0, "no samples")
    assert axe_findings(seen.page) == []
    seen.page.click("#to-live")


def test_live_has_no_serious_finding_in_light_and_dark_and_said_nothing_to_the_console(seen: Seen) -> None:
    seen.page.wait_for_selector("#live:not([hidden])")
    assert axe_findings(seen.page) == []
    seen.page.emulate_media(color_scheme="dark")
    assert axe_findings(seen.page) == []
    seen.page.emulate_media(color_scheme="light")
    assert seen.problems == []


def test_a_phone_needs_no_sideways_scrolling_and_a_keyboard_reaches_everything(
    chromium: Any, api: httpx.Client, token: str
) -> None:
    phone = Seen(chromium, str(api.base_url), width=390)
    phone.login(token)
    phone.page.wait_for_selector("#lanes svg")
    for view, shown in (("#to-live", "#services table"), ("#to-history", "#runs table")):
        phone.page.click(view)
        phone.page.wait_for_selector(shown)
        assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
    phone.page.click("#to-live")
    assert phone.page.evaluate("document.querySelector('a, button, input').className") == "skip"
    phone.page.focus(".skip")
    reached = []
    for _ in range(12):
        phone.page.keyboard.press("Tab")
        reached.append(phone.page.evaluate("document.activeElement.id"))
    order = [
        name
        for name in reached
        if name in {"to-live", "to-history", "logout", "count", "start", "stop-after", "stop-end", "stop-now"}
    ]
    assert order == ["to-live", "to-history", "logout", "count", "start", "stop-after", "stop-end", "stop-now"]
    phone.page.click("#logout")
    assert phone.page.is_visible("#login")
    assert phone.page.is_hidden("#live")
    assert phone.problems == []
    phone.context.close()


def test_stop_ends_the_run_and_the_page_says_so(seen: Seen, node: Node) -> None:
    seen.page.click("#stop-end")
    seen.page.wait_for_selector("#phase[data-phase=ENDED]")
    assert node.wait(30).code == 0
    assert seen.page.is_hidden("#alarm")
    seen.context.close()


class Noting(FakeControl):
    """A run with a replacement that was refused, and a tracker that failed."""

    def _status(self) -> StatusView:
        swap = SwapView(role=Role.ROLLOUT, command=("my", "rollout"), state="refused", case="late_ack", got="two")
        tracker = TrackerView(name="wandb", state="failed", detail="no such project")
        return super()._status().model_copy(update={"swap": swap, "trackers": (tracker,)})


def test_a_service_that_died_is_told_with_all_that_is_known(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.http_site.FakeControl", Noting)
    report = ErrorReport(
        kind="WorkerDied",
        what="the trainer service died",
        got="killed by SIGKILL",
        needed="an answer",
        do="Look at its log.",
    )
    with Site(tmp_path, QUICK) as site:
        site.journal.append(
            RunStarted(
                run="r1", pid=1, host="h", boot_id="b", seed=0, schedule="overlap", share_prefix=True, config_digest="d"
            )
        )
        site.journal.flush()
        page = Seen(chromium, site.server.url)
        page.login(TOKEN)
        page.page.wait_for_selector("#services table")
        assert page.page.is_hidden("#alarm")
        until(
            lambda: "Replacement of rollout: refused at late_ack; got two" in page.page.inner_text("#notes"), "the swap"
        )
        assert "Tracker wandb failed: no such project" in page.page.inner_text("#notes")
        site.journal.append(
            ServiceDied(
                service="trainer[0:0]", role=Role.TRAINER, incarnation=3, pid=77, how="killed by SIGKILL", phase="TRAIN"
            )
        )
        site.journal.append(
            ErrorRaised(error=report, phase="TRAIN", step=4, service="trainer[0:0]", log_path="/logs/trainer.log")
        )
        site.journal.flush()
        page.page.wait_for_selector("#alarm:not([hidden])")
        told = page.page.inner_text("#alarm")
        for part in (
            report.what,
            report.got,
            report.needed,
            report.do,
            "phase TRAIN, step 4",
            "incarnation 3, pid 77",
            "/logs/trainer.log",
        ):
            assert part in told
        assert page.page.get_attribute("#alarm", "role") == "alert"
        assert axe_findings(page.page) == []
        assert page.problems == []
        page.context.close()
