"""`python -m rollplex_rollout`: one rollout process."""

from __future__ import annotations

from rollplex.protocol.common import Role
from rollplex.worker import Segments, Service, run


def make(segments: Segments) -> Service:
    """The service, made after the coordinator let this process in. torch comes with the engine, at LoadRollout."""
    from rollplex_rollout.service import RolloutService  # noqa: PLC0415

    return RolloutService(segments)


if __name__ == "__main__":
    run(Role.ROLLOUT, make)
