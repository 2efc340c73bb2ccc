"""Rollout services of several tensor-parallel ranks, against one engine that has all of the model.

All jobs run in one set of four processes (`rollout_ranks.py`). With one seed the tokens are the same: rounding moves a
logit by 1e-6, and a draw falls so close to a border once in a million tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollplex.errors import ConfigError, StateError
from rollplex.memory.digest import digest
from rollplex.protocol.common import DigestRequest, Kind, LeaseRef, Parallel
from rollplex.protocol.rollout import GenerateUnit, GroupFinished, LoadRollout
from rollplex_rollout.service import RolloutService
from support.ranks import found_by_ranks
from support.tiny import write_model

if TYPE_CHECKING:
    from rollout.conftest import Node

pytestmark = pytest.mark.timeout(200)  # ten seconds of work, on a machine that may be busy
VERSION = 5
RANKS, SECONDS, BOUND = 4, 170.0, 1e-5
ALL = [0, 1, 2, 3]
JOBS: dict[str, dict[str, Any]] = {
    "4 ranks under training 1": {"model": "four", "training": 1, "rollout": 4, "groups": [ALL]},
    "4 ranks, each K/V head on two of them": {"model": "two", "training": 2, "rollout": 4, "groups": [ALL]},
    "2 engines of 2 ranks over training 4": {"model": "four", "training": 4, "rollout": 2, "groups": [[0, 3], [2, 1]]},
    "2 engines of 2 ranks": {"model": "two", "training": 2, "rollout": 2, "groups": [[2], ALL]},
}
ABSENT = {"model": "four", "training": 4, "rollout": 4, "groups": [ALL], "absent": True}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "four", tied=False, kv_heads=4)
    write_model(folder / "two", tied=True, kv_heads=2)
    jobs = [{"name": name, **job} for name, job in (*JOBS.items(), ("absent", ABSENT))]
    script = Path(__file__).with_name("rollout_ranks.py")
    return found_by_ranks(script, folder, jobs, ranks=RANKS, seconds=SECONDS)


@pytest.mark.parametrize("name", JOBS)
def test_ranks_sample_what_one_engine_samples(found: list[dict[str, Any]], name: str) -> None:
    for result in (rank[name] for rank in found):
        assert "error" not in result, result["error"]
        assert result["loaded"], "it tells the bytes of its device's segment"
        assert result["digest"], "it digests its device's segment"
        assert result["same"], "ranks differ in a token or a log-probability"
        assert result["order"]
        assert result["tokens"]
        assert result["lengths"]
        assert result["stopped"]
        assert result["different"] > 1, "some responses meet a stop id, some do not"
        assert result["steps"]
        assert result["vision"]
        assert result["logprobs"] < BOUND


def test_a_rank_holds_the_keys_and_values_of_its_own_heads_as_predicted(found: list[dict[str, Any]]) -> None:
    shares = {name: {round(rank[name]["share"], 2) for rank in found} for name in JOBS}
    assert all(rank[name]["held"] for rank in found for name in JOBS)
    assert all(0.25 < share < 0.27 for share in shares["4 ranks under training 1"]), "and whole hidden states"
    for name in JOBS.keys() - {"4 ranks under training 1"}:
        assert all(0.5 < share < 0.52 for share in shares[name]), f"{name}: a whole head at least"


def test_a_rank_that_does_not_come_is_named_before_long(found: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(found):
        error = rank["absent"].get("error", "")
        assert ("all 4 ranks, at the same point" in error) is (number != 1)


def told(node: Node, parallel: Parallel) -> list[tuple[int, bytes, bytes]]:
    """Of a process that is loaded so: each group's tokens and log-probabilities."""
    service, answers = RolloutService(node.segments), list[Any]()
    service.handle(LoadRollout(cause=1, model=node.spec, actor=node.actor_ref, parallel=parallel), answers.append)
    unit = GenerateUnit(
        cause=2,
        step=2,
        version=VERSION,
        unit=0,
        inputs=node.inputs_ref,
        prompts=node.slots,
        sampling=node.sampling(),
        kv=LeaseRef(lease=4, kind=Kind.ROLLOUT_KV, size_bytes=2**30),
    )
    service.handle(unit, answers.append)
    service.handle(DigestRequest(cause=3), answers.append)
    assert answers[-1].digest == digest(node.actor, node.table)
    groups = [answer for answer in answers if isinstance(answer, GroupFinished)]
    return [(one.responses.group, one.responses.tokens, one.logprobs.values) for one in groups]


def test_an_engine_with_all_of_the_model_meets_nobody_and_samples_the_same_bits_whatever_training_is(
    shared_node: Node,
) -> None:
    alone = told(shared_node, Parallel())
    assert len(alone) == 4
    nobody = "/nowhere/to/meet"
    under_two = Parallel(training=2, rollout=1, device=1, replica=1, replicas=2, meet=nobody)
    for parallel in (under_two, Parallel(replica=1, replicas=2, meet=nobody)):
        assert told(shared_node, parallel) == alone


def test_another_rank_than_the_plans_is_refused_before_anybody_is_met(shared_node: Node) -> None:
    with pytest.raises(StateError, match=r"rank 0 on device 1.*needed rank 1"):
        told(shared_node, Parallel(training=1, rollout=2, device=1, rank=0, meet="unused"))
    with pytest.raises(ConfigError, match="2 attention heads / 4"):
        told(shared_node, Parallel(training=1, rollout=4, device=1, rank=1, meet="unused"))
