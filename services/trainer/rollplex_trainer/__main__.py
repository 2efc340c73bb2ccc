"""`python -m rollplex_trainer`: one trainer process."""

from __future__ import annotations

from rollplex.protocol.common import Role
from rollplex.worker import Segments, Service, run


def make(segments: Segments) -> Service:
    """The service; torch and transformers are imported only now, after the coordinator let this process in."""
    from rollplex_trainer.service import TrainerService  # noqa: PLC0415

    return TrainerService(segments)


if __name__ == "__main__":
    run(Role.TRAINER, make)
