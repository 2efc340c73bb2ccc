"""One digest of a weights version that lies on several devices. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rollplex.protocol.common import Device

DIGEST_BYTES = 32


def combined(digests: Mapping[Device, str]) -> str:
    """Of one device its own; of several blake2b, hexadecimal, over a line "device:digest" for each, by device."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{device}:{digests[device]}\n" for device in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=DIGEST_BYTES).hexdigest()
