"""The digests of a weights version that lies on several devices: one of all, and which must be the same. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rollplex.errors import StateError
from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.fleet import Fleet

DIGEST_BYTES = 32


def combined(digests: Mapping[Device, str]) -> str:
    """Of one device its own; of several blake2b, hexadecimal, over a line "device:digest" for each, by device."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{device}:{digests[device]}\n" for device in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=DIGEST_BYTES).hexdigest()


def check_replicas(fleet: Fleet, digests: Mapping[Device, str]) -> None:
    """Whether replicas still have the same weights. Each steps by itself, with the same gradient: nothing else would
    show that one has gone astray. Compared are devices of the same place in their layout's plan, which hold the same.

    Args:
        digests: of every device that trains.

    Raises:
        StateError: two of them differ.
    """
    leading: dict[int, Device] = {}
    for team in fleet.trainers:
        for device, parallel in zip(team.devices, team.parallels, strict=True):
            first = leading.setdefault(parallel.device, device)
            if digests[device] != digests[first]:
                raise StateError(
                    "Replicas have different weights",
                    got=f"digest {digests[device]} on device {device}",
                    needed=f"{digests[first]}, as device {first} has it",
                    do="Resume from the last checkpoint. This is an error of Rollplex, or of a machine whose "
                    "processors differ.",
                    where=str(team),
                )
