"""Whether a run can be on several devices: what the model can be split by, and what several devices cannot do yet.

Owns the refusals that need the model's shape or the command line; those of the configuration alone are its own
(`rollplex.config.checks`). Nothing was started when they come.
"""

from __future__ import annotations

from rollplex.config.config import Config
from rollplex.errors import ConfigError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.kv import rank_shape
from rollplex.layout.parallel.refusals import check
from rollplex.layout.shape import ModelShape, read_shape
from rollplex_coordinator.options import Options


def check_degrees(config: Config, options: Options) -> None:
    """Refuse what several devices cannot be used for. With one device nothing is checked.

    Raises:
        ConfigError: says the number that does not divide, with the division, or what needs one device.
        ModelError: a model folder that cannot be used.
    """
    devices = config.parallel.devices
    if devices == 1:
        return
    alone = {
        "A verification": options.verify is not None,
        "A run whose workers are started by somebody else": options.external_workers,
    }
    for what, asked in alone.items():
        if asked:
            raise ConfigError(
                f"{what} is on one device",
                got=f"parallel.devices: {devices}",
                needed="1",
                do="Set parallel.devices, parallel.training and parallel.rollout to 1.",
                where="parallel.devices",
            )
    check_shape(config, read_shape(config.model.path))


def check_shape(config: Config, shape: ModelShape) -> None:
    """Whether the model can be split by the degrees.

    Raises:
        ConfigError: says the number that does not divide, with the division.
    """
    parallel = config.parallel
    border = parallel.devices - parallel.rollout_devices
    if parallel.rollout_devices:
        sides = [(parallel.training,) * 2 + (border,), (parallel.rollout,) * 2 + (parallel.rollout_devices,)]
    else:
        sides = [(parallel.training, parallel.rollout, border)]
    try:
        for training, rollout, devices in sides:
            check(shape, TrainingLayout(degree=training), RolloutLayout(degree=rollout), devices=devices)
        rank_shape(shape, parallel.training)
    except ConfigError as error:  # which does not know what the configuration calls it
        raise ConfigError(
            error.what,
            got=error.got,
            needed=error.needed,
            do=error.do or "Change parallel.training, parallel.rollout or parallel.devices.",
            where=f"parallel.{error.where}" if error.where else "parallel",
        ) from None
