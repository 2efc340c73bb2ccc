"""The trackers that a configuration names: whether they can be had, and starting them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from rollplex.config.base import Section
from rollplex.config.config import Config
from rollplex.errors import ConfigError
from rollplex.programs import own
from rollplex_coordinator.records.trackers.tracker import Tracker

QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Of a child's environment: no GPU, one thread, and no library tells anybody of its use."""


def named(config: Config) -> dict[str, Section]:
    """The sections of the trackers that are on, by the name of their module."""
    section = config.trackers
    found = {"wandb": section.wandb, "trackio": section.trackio, "mlflow": section.mlflow}
    return {name: wanted for name, wanted in found.items() if wanted is not None}


def check_trackers(config: Config) -> None:
    """Imports nothing.

    Raises:
        ConfigError: a package that the configuration asks for is not installed.
    """
    for name in named(config):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trackers.{name} needs a package that is not installed",
                got=f"no module {name}",
                needed=f"the package for {name}",
                do=f"pip install 'rollplex[{name}]', or leave trackers.{name} out.",
                where=f"trackers.{name}",
            )


def open_trackers(config: Config, run_dir: Path, run_id: str, base: Mapping[str, str]) -> tuple[Tracker, ...]:
    """Start one process for each tracker; what goes wrong there is told, and ends no run.

    Args:
        base: the coordinator's environment.
    """
    content = config.model_dump(mode="json")
    return tuple(
        Tracker(
            name,
            own("rollplex_coordinator.records.trackers"),
            {
                "backend": name,
                "settings": section.model_dump(mode="json"),
                "run": run_id,
                "group": config.run.name,
                "folder": str(run_dir / name),
                "config": content,
            },
            run_dir / "logs" / f"{name}.log",
            environment={**base, **QUIET},
        )
        for name, section in named(config).items()
    )
