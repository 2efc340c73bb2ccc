"""What each tracker is told: settings, names, steps."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollplex.config.trackers import MlflowSection, TrackersSection, TrackioSection, WandbSection
from rollplex_coordinator.records.trackers.__main__ import serve
from rollplex_coordinator.records.trackers.backends import BACKENDS, MAX_PARAMETER
from support.fake_trackers import write_packages

CONFIG = {"run": {"name": "digits", "seed": 0}, "rewards": {"functions": [{"function": "x" * 900}]}, "eval": None}
ROWS = (
    {"step": 3, "values": {"reward": 0.5, "rewards/my_rewards.py:right/mean": 0.25}},
    {"step": 4, "values": {"reward": 0.75}, "evaluation": "held-out"},
)
Calls = list[list[Any]]
Serve = Callable[..., tuple[int, Calls, list[dict[str, str]]]]


@pytest.fixture
def serve_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """serve_rows(backend, settings, lines): exit code, the package's calls, the answers."""
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("TRACKER_CALLS", str(calls))
    monkeypatch.setenv("WANDB_MODE", "as it was")
    monkeypatch.setenv("TRACKIO_DIR", "as it was")
    monkeypatch.syspath_prepend(str(write_packages(tmp_path / "packages")))
    monkeypatch.setattr(signal, "alarm", lambda _seconds: 0)  # of this process, it would end the tests

    def run(backend: str, settings: dict[str, Any], *lines: object) -> tuple[int, Calls, list[dict[str, str]]]:
        begin = {
            "backend": backend,
            "settings": settings,
            "run": "digits-1",
            "group": "digits",
            "folder": f"/run/{backend}",
            "config": CONFIG,
        }
        answers = io.StringIO()
        text = b"".join(json.dumps(line).encode() + b"\n" for line in (begin, *(lines or ROWS)))
        code = serve(io.BytesIO(text), answers)
        said = [json.loads(line) for line in answers.getvalue().splitlines()]
        return code, [json.loads(line) for line in calls.read_text().splitlines()], said

    yield run
    for name in ("wandb", "trackio", "mlflow"):
        sys.modules.pop(name, None)


def test_wandb_is_off_line_by_default_and_has_trls_names(serve_rows: Serve) -> None:
    code, calls, said = serve_rows("wandb", WandbSection().model_dump(mode="json"))
    assert code == 0
    assert said == [{"state": "ready", "detail": "offline, /run/wandb"}]
    assert calls[0] == [
        "init",
        {
            "project": "rollplex",
            "entity": None,
            "name": "digits-1",
            "group": "digits",
            "dir": "/run",
            "mode": "offline",
            "config": CONFIG,
        },
        "offline",
    ]
    assert calls[3:] == [
        ["log", {"train/reward": 0.5, "train/rewards/my_rewards.py:right/mean": 0.25, "train/global_step": 3}],
        ["log", {"eval/held-out/reward": 0.75, "train/global_step": 4}],
        ["finish"],
    ]


def test_trackio_has_its_database_in_the_run_directory(serve_rows: Serve) -> None:
    code, calls, said = serve_rows("trackio", TrackioSection().model_dump(mode="json"))
    assert code == 0
    assert said == [{"state": "ready", "detail": "/run/trackio"}]
    assert calls[0][2] == "/run/trackio"
    assert calls[1:] == [
        ["log", {"train/reward": 0.5, "train/rewards/my_rewards.py:right/mean": 0.25, "train/global_step": 3}, 3],
        ["log", {"eval/held-out/reward": 0.75, "train/global_step": 4}, 4],
        ["finish"],
    ]


@pytest.mark.parametrize(("uri", "where"), [("", "file:///run/mlflow"), ("http://127.0.0.1:5000", None)])
def test_mlflow_keeps_a_folder_unless_a_server_is_named(serve_rows: Serve, uri: str, where: str | None) -> None:
    code, calls, said = serve_rows("mlflow", MlflowSection(uri=uri).model_dump(mode="json"))
    assert code == 0
    assert said == [{"state": "ready", "detail": where or uri}]
    by_name = {call[0]: call[1:] for call in calls}
    assert by_name["set_tracking_uri"] == [where or uri]
    (parameters,) = by_name["log_params"]
    assert parameters["run.name"] == "digits"
    assert len(parameters["rewards.functions"]) == MAX_PARAMETER
    assert "eval" not in parameters
    assert calls[-3:] == [
        ["log_metrics", {"reward": 0.5, "rewards/my_rewards.py_right/mean": 0.25}, 3],
        ["log_metrics", {"eval/held-out/reward": 0.75}, 4],
        ["end_run"],
    ]


def test_a_package_that_refuses_is_told_in_a_line(serve_rows: Serve) -> None:
    code, calls, said = serve_rows("wandb", WandbSection(project="refused").model_dump(mode="json"))
    assert (code, calls) == (1, [])
    assert said == [{"state": "failed", "detail": "RuntimeError: no such project"}]


def test_a_line_that_is_no_row_is_a_failure_and_no_silence(serve_rows: Serve) -> None:
    code, _, said = serve_rows("wandb", WandbSection().model_dump(mode="json"), {"values": {}})
    assert code == 1
    assert said[-1]["state"] == "failed"
    assert "step" in said[-1]["detail"]


def test_every_tracker_of_the_configuration_has_a_backend() -> None:
    assert set(BACKENDS) == set(TrackersSection.model_fields)
