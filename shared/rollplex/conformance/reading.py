"""What both readers of the weights are asked: a digest, to drain, to take over a new version."""

from __future__ import annotations

from typing import Final

from rollplex.conformance.sitting import Sitting, Violation
from rollplex.conformance.world import Weights
from rollplex.protocol.common import CachesDropped, Committed, DigestReply, DigestRequest, Drain, Drained

NEW_SEED = 77
READER: Final = {
    "digest": "DigestRequest is answered with version and digest of the mapped weights",
    "drained": "Drain is answered with Drained of its version",
    "committed": "Committed is answered with CachesDropped, and the version that the header shows",
}


def ask_digest(sitting: Sitting, weights: Weights) -> None:
    """Raises Violation: not those of the segment."""
    header, value = weights.header.read(), weights.digest
    reply = sitting.ask(lambda cause: DigestRequest(cause=cause), DigestReply)
    if (reply.version, reply.digest) != (header.version, value):
        raise Violation(f"version {reply.version}, {reply.digest}", f"version {header.version}, {value}")


def drain(sitting: Sitting, version: int) -> None:
    """Raises Violation: the answer is of another version."""
    drained = sitting.ask(lambda cause: Drain(cause=cause, version=version), Drained)
    if drained.version != version:
        raise Violation(f"Drained({drained.version})", f"Drained({version})")


def take_over(sitting: Sitting, weights: Weights) -> None:
    """An update by somebody else, and what the reader says of it. Raises Violation: another version."""
    weights.update(NEW_SEED)
    version = weights.header.read().version
    answer = sitting.ask(lambda cause: Committed(cause=cause, version=version), CachesDropped)
    if answer.version != version:
        raise Violation(f"CachesDropped({answer.version})", f"CachesDropped({version})")
