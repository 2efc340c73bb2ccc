"""`python -m rollplex.data`: the input child."""

from __future__ import annotations

from rollplex.data.child import InputService
from rollplex.protocol.common import Role
from rollplex.worker import run

if __name__ == "__main__":
    run(Role.INPUT, InputService)
