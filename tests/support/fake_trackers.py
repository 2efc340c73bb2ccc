"""Packages of trackers that note how they are called, in place of the real ones."""

from __future__ import annotations

from pathlib import Path

_NOTE = """
import json, os
def note(*call):
    with open(os.environ["TRACKER_CALLS"], "a") as file:
        file.write(json.dumps(call, default=str) + "\\n")
"""
_WANDB = (
    _NOTE
    + """
print("a package says something on its standard output")
class Run:
    def define_metric(self, name, step_metric=None):
        note("define_metric", name, step_metric)
    def log(self, values):
        note("log", values)
    def finish(self):
        note("finish")
def init(**settings):
    if settings["project"] == "refused":
        raise RuntimeError("no such project")
    note("init", settings, os.environ["WANDB_MODE"])
    return Run()
"""
)
_TRACKIO = (
    _NOTE
    + """
def init(**settings):
    note("init", settings, os.environ["TRACKIO_DIR"])
def log(values, step):
    note("log", values, step)
def finish():
    note("finish")
"""
)
_MLFLOW = (
    _NOTE
    + """
def set_tracking_uri(uri):
    note("set_tracking_uri", uri)
def set_experiment(name):
    note("set_experiment", name)
def start_run(**settings):
    note("start_run", settings)
def log_params(values):
    note("log_params", values)
def log_metrics(values, step):
    note("log_metrics", values, step)
def end_run():
    note("end_run")
"""
)


def write_packages(folder: Path) -> Path:
    """Modules wandb, trackio and mlflow in `folder`, for PYTHONPATH or sys.path. They write to $TRACKER_CALLS."""
    folder.mkdir()
    for name, text in (("wandb", _WANDB), ("trackio", _TRACKIO), ("mlflow", _MLFLOW)):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder
