"""The real SGLang with two ranks, each in a process of its own (`live_ranks.py`): on the CPU, and on two GPUs of which
each process sees one.

One start serves all tests: it takes two of everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rollplex.layout.parallel.degrees import RolloutLayout
from rollplex.layout.parallel.rank import rank_shape
from rollplex.layout.shape import read_shape
from rollplex.memory.predict import pool_kv_bytes
from rollplex.protocol.common import Memory
from support.live_sglang import KV_TOKENS, unavailable

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-"),
    pytest.mark.filterwarnings("ignore"),  # SGLang's own
    pytest.mark.timeout(900),
]
RANKS, SECONDS = 2, 800
NOISE = {Memory.HOST: 2e-4, Memory.CUDA: 0.06}
UNITS = {"all": [0, 1, 2, 3, 4], "forced": [0, 1, 4], "updated": [1, 2]}


KINDS = [
    pytest.param(Memory.HOST, id="host"),
    pytest.param(
        Memory.CUDA,
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")],
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    device: Memory = request.param
    folder = tmp_path_factory.mktemp("s")
    (folder / "run").mkdir(mode=0o700)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "OMP_NUM_THREADS": "1",
    }
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu] or ["0", "1"]
    script, end = Path(__file__).with_name("live_ranks.py"), time.monotonic() + SECONDS
    running = []
    for rank in range(RANKS):
        with (folder / f"log.{rank}").open("w") as log:
            command = [sys.executable, str(script), str(folder), str(rank), str(device)]
            seen = environment | {"CUDA_VISIBLE_DEVICES": gpus[rank] if device is Memory.CUDA else ""}
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=seen))
    while any(each.poll() is None for each in running) and time.monotonic() < end:
        if any(each.poll() for each in running):
            break
        time.sleep(0.2)
    for each in running:
        each.kill()
    logs = "\n".join((folder / f"log.{rank}").read_text()[-4000:] for rank in range(RANKS))
    assert [each.wait() for each in running] == [0] * RANKS, logs
    results = [json.loads((folder / f"found.{rank}.json").read_text()) for rank in range(RANKS)]
    shape = rank_shape(read_shape(folder / "model0"), RolloutLayout(degree=RANKS))
    pool = pool_kv_bytes(shape, kv_tokens=KV_TOKENS, dtype="float32" if device is Memory.HOST else "bfloat16")
    return [{**each, "pool": pool, "noise": NOISE[device]} for each in results]


def test_each_rank_has_mapped_its_own_devices_segment(found: list[dict[str, Any]]) -> None:
    assert all(rank["table_bytes"] and rank["digest"] for rank in found)


def test_nothing_of_the_ranks_listens_where_another_machine_could_reach_it(found: list[dict[str, Any]]) -> None:
    assert all(set(rank["listening"]) <= {"127.0.0.1", "::1"} for rank in found)


@pytest.mark.parametrize("unit", UNITS)
def test_ranks_say_the_same_bits_and_they_are_the_trainers(found: list[dict[str, Any]], unit: str) -> None:
    first, second = (rank[unit] for rank in found)
    assert first == second, "groups, order, tokens, log-probabilities, counts"
    assert sorted(first["order"]) == UNITS[unit]
    assert first["prefilled"] == 1
    assert first["difference"] < found[0]["noise"]
    assert first["held"] == found[0]["pool"], "of a rank's share of the heads"


def test_groups_come_as_they_end_on_both_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["forced"]["order"][0] == 4
        assert rank["forced"]["lengths"][0] == [2, 1, 3, 2]
        assert rank["forced"]["decode_steps"] == 39


def test_a_scheduler_process_that_is_killed_ends_the_unit_on_both_ranks_soon(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "SGLang" in rank["killed"]["error"]
        assert rank["killed"]["seconds"] < 60
        assert rank["left"] == [], "no process and no socket"
