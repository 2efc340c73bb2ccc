"""Trackers by configuration: refused if they cannot be had, and through a real process if they can."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollplex.config.trackers import MlflowSection, TrackersSection, WandbSection
from rollplex.errors import ConfigError
from rollplex_coordinator.records.trackers.opening import check_trackers, named, open_trackers
from rollplex_coordinator.records.trackers.tracker import close_all
from support.core import make_config
from support.fake_trackers import write_packages


def test_none_is_on_by_default(model_folder: Path) -> None:
    config = make_config(model_folder)
    assert named(config) == {}
    check_trackers(config)


def test_a_package_that_is_not_installed_is_refused_by_name(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    check_trackers(make_config(model_folder, trackers={"wandb": {}}))
    with pytest.raises(ConfigError, match=r"trackers.mlflow needs a package .*pip install 'rollplex\[mlflow\]'"):
        check_trackers(make_config(model_folder, trackers={"wandb": {}, "mlflow": {}}))


def test_nothing_is_sent_over_a_network_unless_asked() -> None:
    assert WandbSection().mode == "offline"
    assert MlflowSection().uri == ""
    assert TrackersSection().model_dump() == {"wandb": None, "trackio": None, "mlflow": None}


def test_a_run_of_a_tracker_in_its_own_process(model_folder: Path, tmp_path: Path) -> None:
    packages = write_packages(tmp_path / "packages")
    calls = tmp_path / "calls"
    base = {**os.environ, "TRACKER_CALLS": str(calls)}
    base["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    config = make_config(model_folder, trackers={"wandb": {"project": "digits"}})
    (tracker,) = open_trackers(config, tmp_path, "run-1", base)
    tracker.put(0, {"reward": 0.5})
    close_all([tracker], 60.0)
    assert tracker.state == "ready", tracker.detail
    assert tracker.detail == f"offline, {tmp_path / 'wandb'}"
    first, *_, last, finish = [json.loads(line) for line in calls.read_text().splitlines()]
    assert first[1]["project"] == "digits"
    assert first[1]["config"]["run"]["seed"] == config.run.seed
    assert last == ["log", {"train/reward": 0.5, "train/global_step": 0}]
    assert finish == ["finish"]
    assert "a package says something" in (tmp_path / "logs/wandb.log").read_text()
