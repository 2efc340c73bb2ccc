"""What a query names: enough of PromQL for our own dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards" / "rollplex.json"
_METRIC = re.compile(r"\b((?:rollplex|process)_[a-z0-9_]+)(\{[^}]*\})?")
_MATCHER = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
_GROUPING = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
_LEGEND = re.compile(r"\{\{\s*([a-z_]+)\s*\}\}")
SCRAPED_WITH = {"job", "instance"}
"""Labels that Prometheus adds."""


class Query(Struct, frozen=True, kw_only=True):
    """One query of a panel. metrics: names with the labels that it asks them for. labels: all that it needs them to
    have, by grouping and by the legend."""

    panel: str
    expr: str
    metrics: dict[str, dict[str, str]]
    labels: frozenset[str]


def query(panel: str, expr: str, legend: str = "") -> Query:
    """What an expression names."""
    metrics: dict[str, dict[str, str]] = {}
    for name, matchers in _METRIC.findall(expr):
        metrics[name] = dict(_MATCHER.findall(matchers))
    grouped = {label.strip() for inner in _GROUPING.findall(expr) for label in inner.split(",") if label.strip()}
    return Query(panel=panel, expr=expr, metrics=metrics, labels=frozenset(grouped | set(_LEGEND.findall(legend))))


def dashboard() -> dict[str, Any]:
    """The dashboard that is provisioned."""
    content: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return content


def queries(content: dict[str, Any]) -> list[Query]:
    """Every query of every panel."""
    return [
        query(panel["title"], target["expr"], target["legendFormat"])
        for panel in content["panels"]
        for target in panel["targets"]
    ]


def labels_of(exposition: str) -> dict[str, set[str]]:
    """By the name of a sample: the labels that it has."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def iteration_metrics(exposition: str) -> set[str]:
    """Names of the metrics of the last iteration."""
    families = text_string_to_metric_families(exposition)
    samples = [sample for family in families for sample in family.samples]
    return {sample.labels["name"] for sample in samples if sample.name == "rollplex_iteration_metric"}
