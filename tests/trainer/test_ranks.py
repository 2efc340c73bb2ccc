"""Trainers of several ranks and replicas against one that is alone.

All jobs run in one set of four processes (`trainer_ranks.py`). Each but the first goes on from the checkpoint of the
one before, under other degrees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.ranks import found_by_ranks
from support.tiny import write_model

RANKS, SECONDS = 4, 110.0
JOBS: dict[str, dict[str, Any]] = {
    "TP 4, rollout 2": {"training": 4, "rollout": 2},
    "TP 2, DP 2, copied to two that sample": {
        "training": 2, "rollout": 2, "target": 1, "restore": "TP 4, rollout 2", "again": True,
    },
    "DP 4, rollout 2": {"training": 1, "rollout": 2, "restore": "TP 2, DP 2, copied to two that sample"},
    "TP 2, rollout 1": {"training": 2, "rollout": 1, "restore": "DP 4, rollout 2"},
    "TP 2 in bfloat16, vision frozen": {
        "training": 2, "rollout": 1, "dtype": "bfloat16", "frozen": True, "bad": True,
    },
}  # fmt: skip
ON_DEVICE: dict[str, Any] = {
    "training": 2, "rollout": 1, "target": 1, "dtype": "bfloat16", "on_device": True,
}  # fmt: skip
MASTERS: dict[str, Any] = {"training": 2, "rollout": 1, "dtype": "bfloat16", "again": True}
ABSENT: dict[str, Any] = {"training": 4, "rollout": 4, "absent": True}
SAME_METRICS = {"learning_rate", "loss_normaliser", "groups", "groups_skipped", "reward", "completions/max_length"}
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By job: what each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "model", kv_heads=4)
    jobs = [
        {"name": name, "dtype": "float32", **job}
        for name, job in (*JOBS.items(), ("on a device", ON_DEVICE), ("masters", MASTERS), ("absent", ABSENT))
    ]
    script = Path(__file__).with_name("trainer_ranks.py")
    results = found_by_ranks(script, folder, jobs, ranks=RANKS, seconds=SECONDS)
    return {job["name"]: [result[job["name"]] for result in results] for job in jobs}


each_job = pytest.mark.parametrize("name", JOBS)


def bound(name: str) -> float:
    """In bfloat16 sums over ranks are rounded in between, which is seen in all that is made of them."""
    return 0.1 if "bfloat16" in name else 1e-5


@each_job
def test_gradients_and_an_update_are_those_of_one_trainer(found: Found, name: str) -> None:
    for result in found[name]:
        assert "error" not in result, result["error"]
        assert result["finite"]
    single = found[name][0]["single"]
    assert single["size"], "the file of gradients is as long"
    assert single["gradients"] < bound(name)
    assert single["moved"] > 1e-3, "the update is far larger"
    assert single["weights"] < bound(name)
    assert max(single["states"].values()) < bound(name)
    assert single["steps"]


@each_job
def test_norm_and_metrics_are_those_of_the_whole_step_on_every_rank(found: Found, name: str) -> None:
    wanted = found[name][0]["single"]["metrics"]
    for result in found[name]:
        assert result["metrics"] == found[name][0]["metrics"], "bit for bit the same on all"
        assert result["metrics"].keys() == wanted.keys()
        for key, value in wanted.items():
            exact = key in SAME_METRICS
            assert result["metrics"][key] == pytest.approx(value, rel=0 if exact else bound(name), abs=bound(name)), key


@each_job
def test_replicas_have_the_same_bits(found: Found, name: str) -> None:
    by_rank: dict[int, set[tuple[str, str, str]]] = {}
    for result in found[name]:
        by_rank.setdefault(result["where"][0], set()).add((result["arena"], result["shards"], result["state"]))
    assert {rank: len(bits) for rank, bits in by_rank.items()} == dict.fromkeys(range(JOBS[name]["training"]), 1)


@each_job
def test_nobody_may_read_before_all_have_stepped_and_then_the_rollouts_parameters_are_right(
    found: Found, name: str
) -> None:
    version = list(JOBS).index(name) if "restore" in JOBS[name] else 0
    for result in found[name]:
        assert result["table_bytes"], "Loaded says the bytes of the device's segment"
        assert "does not hold weights (yet)" in result["empty"]
        assert result["sampled first"] == []
        assert result["applied"] == ["", "UPDATING", version]
        assert result["sampled second"] == []
        assert result["digest"], "DigestRequest finds what Published said"
        for step in ("first", "second"):
            assert result[step]["header"]
            assert result[step]["bytes"] == result[step]["planned"]


def test_what_is_copied_depends_on_the_degrees(found: Found) -> None:
    def copied(name: str, step: str = "second") -> list[list[int]]:
        return [result[step]["bytes"] for result in found[name]]

    assert all(refreshed > 0 and rebuilt == 0 for refreshed, rebuilt in copied("TP 4, rollout 2"))
    assert copied("DP 4, rollout 2") == [[0, 0]] * RANKS, "rollout reads rows and columns of what is trained here"
    targets = copied("TP 2, DP 2, copied to two that sample")
    assert targets[0] == targets[1]
    assert targets[0][1] > 0
    assert targets[2:] == [[0, 0]] * 2, "replica 0 fills the devices that only sample"
    frozen = "TP 2 in bfloat16, vision frozen"
    assert all(now[0] < first[0] for now, first in zip(copied(frozen), copied(frozen, "first"), strict=True))


@each_job
def test_a_checkpoint_is_the_one_that_a_trainer_alone_would_write(found: Found, name: str) -> None:
    """Restored by a trainer that is alone and saved again it has the same files; the digest in it holds."""
    assert found[name][0]["single"]["same files"]
    assert found[name][0]["single"]["same identity"]
    for result in found[name][1:]:
        assert "does not keep the gradients" in result["not asked"]


def test_a_whole_step_of_ranks_mixes_no_tensors_of_the_host_with_those_of_their_device(found: Found) -> None:
    for result in found["on a device"]:
        assert "error" not in result, result["error"]
        assert result["seen"] > 100
        assert result["finite"]
        assert (result["sampled first"], result["sampled second"]) == ([], [])
    assert found["on a device"][0]["single"]["same files"]


def test_a_number_that_is_not_finite_on_one_rank_refuses_the_update_on_all(found: Found) -> None:
    for result in found["TP 2 in bfloat16, vision frozen"]:
        assert not result["bad"]["finite"]
        assert "grad_norm" not in result["bad"]["metrics"]
        assert "cannot apply the update now" in result["bad"]["refused"]
        assert result["bad"]["version"] == 0


def test_a_rank_whose_step_fails_poisons_its_weights_and_is_named(found: Found) -> None:
    for result in found["TP 2 in bfloat16, vision frozen"]:
        failed = result["where"] == [0, 1]
        assert result["failing"]["state"] == ("POISONED" if failed else "UPDATING")
        assert ("rank 0 of replica 1" in result["failing"]["error"]) is failed


def test_a_rank_that_never_comes_to_the_vote_ends_the_others_by_the_collectives_deadline(found: Found) -> None:
    for rank, result in enumerate(found["absent"]):
        assert ("A collective among ranks has failed" in result.get("error", "")) is (rank != 1)


def test_in_the_middle_of_a_step_other_trainers_find_what_stands_and_do_it_again(found: Found) -> None:
    name = "TP 2, DP 2, copied to two that sample"
    version = list(JOBS).index(name) + 1
    targets = 0
    for result in found[name]:
        again = result["again"]
        assert "not those of the last update; got digest" in again["refused"]
        assert again["left"], "weights and optimizer state"
        assert again["zeroed"]
        assert again["finite"]
        assert again["arena"], "the gradients have the same bits"
        assert again["published"]
        assert again["targets"] == [version + 1] * len(again["targets"])
        targets += len(again["targets"])
    assert targets == 2


def test_other_trainers_refuse_master_weights_that_do_not_round_to_the_weights_that_stand(found: Found) -> None:
    for result in found["masters"]:
        assert "error" not in result, result["error"]
        assert "master weights that do not round to them" in result["again"]["masters"]
        assert result["again"]["left"]
        assert result["again"]["arena"], "with those that do they go on"
        assert result["again"]["published"]
