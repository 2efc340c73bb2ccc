"""A view of a run with every kind of line in it."""

from __future__ import annotations

from rollplex.terminal.view import Evaluation, Memory, Timing, View, Wait

FULL = View(
    run="digits-1",
    schedule="overlap",
    phase="ROLLOUT",
    done=100,
    wanted=400,
    version=99,
    stopping="",
    elapsed_s=75.0,
    left_s=14.4,
    reward=0.523,
    hidden=0.66,
    timings=(
        Timing(name="iteration", last_s=0.05, median_s=0.048),
        Timing(name="rollout", last_s=0.031, median_s=0.03),
    ),
    evaluations=(Evaluation(name="held_out", step=100, values=(("reward", 0.61), ("right", 0.6))),),
    memory=(Memory(device="0:0", leased_bytes=3 * 2**20, budget_bytes=2**32, peak_bytes=5 * 2**20),),
    services=(("rollout", "busy"), ("trainer", "ready")),
    waits=(Wait(what="generate groups 0-3", source="rollout[0:0]", age_s=3.2),),
)
