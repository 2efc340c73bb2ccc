"""`python -m rollplex_prefix`: one prefix process."""

from __future__ import annotations

from rollplex.protocol.common import Role
from rollplex.worker import Segments, Service, run


def make(segments: Segments) -> Service:
    """The service; torch and transformers are imported only now, after the coordinator let this process in."""
    from rollplex_prefix.service import PrefixService  # noqa: PLC0415

    return PrefixService(segments)


if __name__ == "__main__":
    run(Role.PREFIX, make)
