"""What is done with a row, by tracker. Only a tracker's own process imports this; it imports the tracker's package.

tracker    where the numbers go by default              names of training        of an evaluation
---------  -------------------------------------------  -----------------------  ----------------------------
wandb      RUN/wandb/, for `wandb sync`                 train/<TRL's name>       eval/<evaluation>/<name>
trackio    RUN/trackio/, its database                   train/<TRL's name>       eval/<evaluation>/<name>
mlflow     RUN/mlflow/, a folder that `mlflow ui` shows  <TRL's name>            eval/<evaluation>/<name>

So they are beside those of TRL's trainers in the same project. Step: train/global_step, or MLflow's own step.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

STEP = "train/global_step"
MAX_PARAMETER = 500
"""Characters of one of MLflow's parameters; they are sent in parts of a hundred."""
_PART = 100
_NOT_MLFLOW = re.compile(r"[^A-Za-z0-9_\-. /]")


class Begin(Struct, frozen=True, kw_only=True):
    """The first line. settings: the tracker's section. folder: where it may leave files. config: of the run."""

    backend: str
    settings: dict[str, Any]
    run: str
    group: str
    folder: str
    config: dict[str, Any]


class Row(Struct, frozen=True, kw_only=True):
    """Numbers of one step; of an evaluation, if it is named."""

    step: int
    values: dict[str, float]
    evaluation: str = ""


class Backend(Protocol):
    """One tracker, begun. Methods raise whatever its package raises."""

    where: str
    """Where the numbers go, for people."""

    def log(self, row: Row) -> None:
        """Take one row."""
        ...

    def finish(self) -> None:
        """Nothing more will come."""
        ...


class Wandb:
    """Weights & Biases."""

    def __init__(self, begin: Begin) -> None:
        settings, folder = begin.settings, Path(begin.folder).parent
        mode = settings["mode"]
        os.environ["WANDB_MODE"] = mode
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=settings["project"],
            entity=settings["entity"] or None,
            name=begin.run,
            group=begin.group,
            dir=str(folder),  # it makes a folder wandb in there
            mode=mode,
            config=begin.config,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self.where = f"{mode}, {begin.folder}"

    def log(self, row: Row) -> None:
        self._run.log({**_prefixed(row), STEP: row.step})

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio."""

    def __init__(self, begin: Begin) -> None:
        os.environ["TRACKIO_DIR"] = begin.folder
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(
            project=begin.settings["project"], name=begin.run, group=begin.group, config=begin.config, embed=False
        )
        self.where = begin.folder

    def log(self, row: Row) -> None:
        self._trackio.log({**_prefixed(row), STEP: row.step}, step=row.step)

    def finish(self) -> None:
        self._trackio.finish()


class Mlflow:
    """MLflow."""

    def __init__(self, begin: Begin) -> None:
        self.where = begin.settings["uri"] or Path(begin.folder).absolute().as_uri()
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_tracking_uri(self.where)
        self._mlflow.set_experiment(begin.settings["experiment"])
        self._mlflow.start_run(run_name=begin.run, tags={"group": begin.group})
        parameters = list(_leaves(begin.config))
        for first in range(0, len(parameters), _PART):
            self._mlflow.log_params(dict(parameters[first : first + _PART]))

    def log(self, row: Row) -> None:
        prefix = f"eval/{row.evaluation}/" if row.evaluation else ""
        values = {_NOT_MLFLOW.sub("_", prefix + name): value for name, value in row.values.items()}
        self._mlflow.log_metrics(values, step=row.step)

    def finish(self) -> None:
        self._mlflow.end_run()


BACKENDS: Mapping[str, Callable[[Begin], Backend]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def _prefixed(row: Row) -> dict[str, float]:
    prefix = f"eval/{row.evaluation}/" if row.evaluation else "train/"
    return {prefix + name: value for name, value in row.values.items()}


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a configuration, dotted, with its value as text."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield _NOT_MLFLOW.sub("_", f"{prefix}{name}"), str(value)[:MAX_PARAMETER]
