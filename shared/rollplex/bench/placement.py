"""Where training and rollout are, as commands and tables write it. Pure.

2x1/1x2     on the same devices: training TP 2 x 1 replica, rollout TP 1 x 2 engines
1x1+1x1     apart: the first devices train, the others sample from copies of the weights
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from rollplex.errors import ConfigError

_FORM: Final = re.compile(r"(\d+)x(\d+)([/+])(\d+)x(\d+)")


class Placement(Struct, frozen=True, kw_only=True):
    """Degrees and numbers of teams."""

    training: int
    replicas: int
    rollout: int
    engines: int
    apart: bool = False
    """The rollout has devices of its own."""

    @property
    def training_devices(self) -> int:
        return self.training * self.replicas

    @property
    def rollout_devices(self) -> int:
        """That only sample."""
        return self.rollout * self.engines if self.apart else 0

    @property
    def devices(self) -> int:
        return self.training_devices + self.rollout_devices

    @property
    def keys(self) -> dict[str, int | str]:
        """The section `parallel` of a configuration that makes it."""
        return {
            "devices": self.devices,
            "training": self.training,
            "rollout": self.rollout,
            "placement": "disaggregated" if self.apart else "colocated",
            "rollout_devices": self.rollout_devices,
        }

    @property
    def overrides(self) -> tuple[str, ...]:
        """The same, key by key."""
        return tuple(f"parallel.{name}={value}" for name, value in self.keys.items())

    @property
    def file_name(self) -> str:
        """Fit for a folder, and short: paths of sockets are limited."""
        return str(self).replace("/", "-")

    def __str__(self) -> str:
        between = "+" if self.apart else "/"
        return f"{self.training}x{self.replicas}{between}{self.rollout}x{self.engines}"


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Placements such as 4x1/2x2, with commas.

    Raises:
        ConfigError: not one, or its two sides need different numbers of devices.
    """
    return tuple(dict.fromkeys(_placement(part.strip()) for part in text.split(",")))


def _placement(text: str) -> Placement:
    match = _FORM.fullmatch(text)
    numbers = [int(match[group]) for group in (1, 2, 4, 5)] if match else []
    apart = match is not None and match[3] == "+"
    if not numbers or 0 in numbers or (not apart and numbers[0] * numbers[1] != numbers[2] * numbers[3]):
        raise ConfigError(
            "This is no layout of devices",
            got=text,
            needed="training TP x replicas / rollout TP x engines, with as many devices on both sides: 4x1/2x2; or "
            "with + between them, for devices of their own: 1x1+1x1",
        )
    training, replicas, rollout, engines = numbers
    return Placement(training=training, replicas=replicas, rollout=rollout, engines=engines, apart=apart)
