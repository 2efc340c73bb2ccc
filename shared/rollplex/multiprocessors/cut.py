"""Where a GPU's multiprocessors are cut in two: pure arithmetic, the same in every process.

    multiprocessors     0 ........ first │ first ........ total
                        FIRST (decoding) │ LAST (prefix work)

Each process knows its own share only. Two shares whose sum is at most 1 get parts that do not overlap, and whose sum is
exactly 1 get the same cut, because every share is turned into the place of a cut and all are rounded alike.
"""

from __future__ import annotations

from enum import StrEnum

from rollplex.errors import ConfigError

_DIGITS = 9
"""1 - 0.64 is not 0.36; neither is to decide where a cut goes."""


class Side(StrEnum):
    """Which end of the device."""

    FIRST = "first"
    LAST = "last"


def grain(major: int) -> int:
    """How many multiprocessors the driver keeps together, for a compute capability's major number; also the fewest
    that a part may have."""
    if major >= 9:
        return 8
    return 4 if major == 8 else 2


def cut(total: int, share: float, side: Side, *, grain: int) -> int:
    """How many multiprocessors the first part has; a multiple of `grain`.

    Args:
        total: multiprocessors of the device.
        share: of them that the part on `side` is to have, above 0 and below 1. It gets the nearest number possible.

    Raises:
        ConfigError: a share out of range, or a device too small to be cut.
    """
    if not 0.0 < share < 1.0:
        raise ConfigError(
            "A part of a GPU has some of its multiprocessors", got=f"share {share}", needed="0 < share < 1"
        )
    highest = (total - grain) // grain * grain
    if highest < grain:
        raise ConfigError(
            "This GPU is too small to be shared by its multiprocessors",
            got=f"{total} of them",
            needed=f"at least {2 * grain}",
            do="Set device.prefix_share and device.decode_share to 1.",
        )
    wanted = round((share if side is Side.FIRST else 1.0 - share) * total, _DIGITS)
    return min(max(round(wanted / grain) * grain, grain), highest)
