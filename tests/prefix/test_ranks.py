"""A prefix service on each of several tensor-parallel ranks, against one that has all of the model.

All jobs run in one set of four processes (`prefix_ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollplex.errors import ConfigError, StateError
from rollplex.protocol.common import Parallel
from rollplex_prefix.service import PrefixService
from support.prefix import World
from support.ranks import found_by_ranks
from support.tiny import write_model

pytestmark = pytest.mark.timeout(200)  # ten seconds of work, on a machine that may be busy
RANKS, SECONDS, BOUND = 4, 170.0, 1e-5
ALL = [0, 1, 2, 3]
JOBS: dict[str, dict[str, Any]] = {
    "4 ranks": {"training": 4, "rollout": 4, "groups": [ALL]},
    "4 ranks over storage of rollout 2, the forward runs again": {
        "training": 4, "rollout": 2, "groups": [ALL], "activations": "recompute_layers",
    },
    "2 replicas of 2 ranks over storage of rollout 1, vision frozen": {
        "training": 2, "rollout": 1, "groups": [[0, 1], [2, 3]], "frozen": True,
    },
    "2 replicas of 2 ranks under rollout 4": {
        "training": 2, "rollout": 4, "groups": [[1], [0, 2, 3]], "activations": "layers",
    },
}  # fmt: skip
ABSENT: dict[str, Any] = {"training": 4, "rollout": 4, "groups": [ALL], "absent": True}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    for name, seed in (("model", 3), ("model reference", 4)):
        write_model(folder / name, seed=seed, kv_heads=4)
    jobs = [{"name": name, "model": "model", **job} for name, job in (*JOBS.items(), ("absent", ABSENT))]
    script = Path(__file__).with_name("prefix_ranks.py")
    return found_by_ranks(script, folder, jobs, ranks=RANKS, seconds=SECONDS)


@pytest.mark.parametrize("name", JOBS)
def test_ranks_together_have_what_one_process_has(found: list[dict[str, Any]], name: str) -> None:
    for result in (rank[name] for rank in found):
        assert "error" not in result, result["error"]
        assert result["loaded"], "it tells the bytes of its device's segment"
        assert result["digest"], "it digests its device's segment"
        assert result["held"], "a reference prefix is K and V of its own heads"
        assert abs(result["graph"] - 1) < 0.05, "what an actor prefix keeps, against what is leased for a rank"
        assert result["same"], "ranks differ in scores or hidden states"
        assert result["heads"] < BOUND, "K, V and their gradients"
        assert max(result["scores"], result["hidden"]) < BOUND
        assert max(result["prefix"], result["both"]) < BOUND, "gradients"


def test_a_rank_that_does_not_come_is_named_before_long(found: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(found):
        error = rank["absent"].get("error", "")
        assert ("all 4 ranks, at the same point" in error) is (number != 1)


def test_another_rank_than_the_plans_and_too_many_ranks_are_refused_before_anybody_is_met(
    make_world: Callable[..., World],
) -> None:
    world = make_world()

    def load(parallel: Parallel) -> None:
        PrefixService(world.segments).handle(replace(world.load, parallel=parallel), lambda _: None)

    with pytest.raises(StateError, match=r"rank 1 on device 0.*needed rank 0"):
        load(Parallel(training=1, rollout=2, device=0, rank=1, replicas=2))
    with pytest.raises(ConfigError, match="1 K/V heads / 2 ranks"):
        load(Parallel(training=2, rollout=2, meet="unused"))
