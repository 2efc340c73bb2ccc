"""Section trackers: where a run's numbers go beside the run directory. Nothing is sent over a network unless asked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollplex.config.base import Section

Name = Annotated[str, Field(min_length=1, max_length=128)]


class WandbSection(Section):
    """Weights & Biases (`pip install 'rollplex[wandb]'`)."""

    project: Name = "rollplex"
    """The project that runs belong to."""
    entity: Annotated[str, Field(max_length=128)] = ""
    """User or team. Empty: the account's own."""
    mode: Literal["offline", "online"] = "offline"
    """offline: files in the run directory, for `wandb sync`. online: sent as the run goes on."""


class TrackioSection(Section):
    """Trackio, on this machine (`pip install 'rollplex[trackio]'`)."""

    project: Name = "rollplex"
    """The project that runs belong to."""


class MlflowSection(Section):
    """MLflow (`pip install 'rollplex[mlflow]'`)."""

    experiment: Name = "rollplex"
    """The experiment that runs belong to."""
    uri: Annotated[str, Field(max_length=2_048)] = ""
    """Tracking server, database or folder, as MLflow writes them. Empty: the folder mlflow in the run directory."""


class TrackersSection(Section):
    """Trackers beside TensorBoard. Each is off unless it is named; `{}` takes its defaults."""

    wandb: WandbSection | None = None
    """Weights & Biases, off-line by default."""
    trackio: TrackioSection | None = None
    """Trackio, with its database in the run directory."""
    mlflow: MlflowSection | None = None
    """MLflow, with its files in the run directory by default."""
