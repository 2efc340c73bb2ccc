"""Names of metrics by Prometheus' conventions, and a dashboard that asks for nothing else."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollplex.journal.phases import Phase
from support.http_site import Site, fill
from support.promql import SCRAPED_WITH, dashboard, labels_of, queries, query

ROOT = Path(__file__).resolve().parents[3]
MakeSite = Callable[..., Site]
NAME = re.compile(r"rollplex(_[a-z0-9]+)+")
FOREIGN_UNITS = {"ms", "milliseconds", "minutes", "hours", "kib", "mib", "gib", "kilobytes", "megabytes", "percent"}
ENDINGS_OF_OTHER_TYPES = ("_count", "_sum", "_bucket")
SOURCES = (
    "services/trainer/rollplex_trainer/metrics.py",
    "services/coordinator/rollplex_coordinator/steps/iteration.py",
)


@pytest.fixture
def exposition(make_site: MakeSite) -> str:
    """A scrape in which every metric has a sample."""
    site = make_site()
    fill(site)
    with site.client() as client:
        client.get("/status")
        return client.get("/metrics").text


def test_every_metric_has_a_text_a_type_and_a_name_in_base_units(exposition: str) -> None:
    helps = set(re.findall(r"^# HELP (\S+) \S", exposition, re.MULTILINE))
    families = [
        family for family in text_string_to_metric_families(exposition) if not family.name.startswith("process")
    ]
    assert len(families) > 20
    for family in families:
        exposed = f"{family.name}_total" if family.type == "counter" else family.name
        assert exposed in helps, f"{exposed} has no help"
        assert family.type in {"counter", "gauge", "histogram"}, family
        assert NAME.fullmatch(family.name), family.name
        assert not FOREIGN_UNITS & set(family.name.split("_")), family.name
        assert not family.name.endswith(ENDINGS_OF_OTHER_TYPES), family.name
        assert family.type == "counter" or not family.name.endswith("_total"), family.name
        for sample in family.samples:
            assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in sample.labels), sample
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    durations = [name for name in names if "wait_" in name or "time" in name or "duration" in name]
    assert all(name.endswith("_seconds") for name in durations), durations


def test_promtool_finds_nothing(exposition: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (it comes with Prometheus)")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=exposition, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_query_of_the_dashboard_names_metrics_and_labels_that_there_are(exposition: str) -> None:
    there = labels_of(exposition)
    found = queries(dashboard())
    assert len(found) > 30
    for item in found:
        assert item.metrics or item.expr == "vector(0)", item
        for name, matchers in item.metrics.items():
            assert name in there, f"{item.panel}: no metric {name}"
            assert set(matchers) <= there[name] | SCRAPED_WITH, f"{item.panel}: labels of {name}"
            assert item.labels <= there[name] | SCRAPED_WITH | {"le"}, f"{item.panel}: {item.labels} of {name}"


def test_a_query_that_names_a_metric_or_label_that_is_not_there_is_seen() -> None:
    item = query("p", 'sum by (kind) (rate(rollplex_nothing_total{role="x"}[5m]))', "{{device}}")
    assert item.metrics == {"rollplex_nothing_total": {"role": "x"}}
    assert item.labels == {"kind", "device"}


def test_the_dashboard_asks_for_numbers_of_an_iteration_that_the_code_has() -> None:
    """As the sources spell them; the test with containers asks a run."""
    known = {f"time/{phase.name.lower()}_s" for phase in Phase}
    for source in SOURCES:
        tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
        known |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    known |= {f"sampling/sampling_logp_difference/{part}" for part in ("mean", "max")}
    asked = {
        matchers["name"]
        for item in queries(dashboard())
        for name, matchers in item.metrics.items()
        if name == "rollplex_iteration_metric"
    }
    assert len(asked) > 15
    assert asked <= known


def test_the_dashboard_has_no_two_panels_in_one_place() -> None:
    content = dashboard()
    assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])
    cells = [
        (x, y)
        for panel in content["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
