"""`python -m rollplex.rewards`: the reward child."""

from __future__ import annotations

from rollplex.protocol.common import Role
from rollplex.rewards.child import RewardService
from rollplex.worker import run

if __name__ == "__main__":
    run(Role.REWARD, lambda _segments: RewardService())
