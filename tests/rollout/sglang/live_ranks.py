"""One rank of test_live_ranks.py: a process with a rollout service over the segment of a device of its own, and the
real SGLang, on the CPU (float32) or on the one GPU that it sees (bfloat16).

    python live_ranks.py FOLDER RANK host|cuda        FOLDER/found.RANK.json is what it found
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from rollplex.errors import RollplexError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.parts import rollout_parts
from rollplex.layout.parallel.plan import plan
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.tensors import DTYPES, tensor, views
from rollplex.model.device import finish, torch_device
from rollplex.model.parallel.views import shard_views
from rollplex.protocol.common import Committed, DigestRequest, Drain, Kind, LeaseRef, Memory, Parallel
from rollplex.protocol.rollout import GenerateUnit, GroupFinished, LoadRollout, Prefilled, Sampling, UnitGenerated
from rollplex_rollout.engine import FinishedGroup
from rollplex_rollout.service import RolloutService
from support.live_sglang import VERSION, LiveNode, kernels, listening, processes
from support.ranks import put_shards

DEGREE = 2
ALL = (0, 1, 2, 3, 4)


class Rank:
    """A service of one rank."""

    def __init__(self, folder: Path, rank: int, device: Memory) -> None:
        run_dir, dtype = folder / "run", "float32" if device is Memory.HOST else "bfloat16"
        self.node = node = LiveNode(folder / f"model{rank}", run_dir, dtype, device)
        node.segments.run_dir = run_dir
        layouts = TrainingLayout(degree=DEGREE), RolloutLayout(degree=DEGREE)
        self.device = plan(node.table, node.shape, *layouts).devices[rank]
        self.total_bytes = self.device.storage.total_bytes
        self.ref = node.segments.create(Kind.ACTOR_WEIGHTS, self.total_bytes)
        self.pages = node.segments.map_again(self.ref)
        self.pages.clear()
        self.fill()
        self.header = HeaderPage(self.pages, run_id=node.segments.run_id, table_hash=node.table.hash)
        self.header.initialise(VERSION, digest(self.pages, node.table, self.total_bytes))
        self.version = VERSION
        self.parallel = Parallel(
            training=DEGREE, rollout=DEGREE, device=rank, rank=rank, meet=str(run_dir / "meet.1"), collective_s=300.0
        )
        self.service = RolloutService(node.segments)
        self.causes = 0

    def fill(self) -> None:
        """The rank's shards of the node's whole weights."""
        item = self.node.table.item_bytes
        numbers = tensor(self.pages, 0, (self.total_bytes // item,), DTYPES[self.node.dtype])
        parts = rollout_parts(self.device)
        put_shards(shard_views(numbers, parts), parts, views(self.node.actor, self.node.table))
        finish(torch_device(self.node.device))

    def send(self, kind: Any, **fields: Any) -> list[Any]:
        """The answers to an instruction."""
        answers = list[Any]()
        self.causes += 1
        self.service.handle(kind(cause=self.causes, **fields), answers.append)
        return answers

    def generate(self, groups: tuple[int, ...], **changes: Any) -> list[Any]:
        values = {"seed": 3, "purpose": "train", "group_size": 4, "max_new_tokens": 24, "temperature": 1.0}
        return self.send(
            GenerateUnit,
            step=2,
            version=self.version,
            unit=0,
            inputs=self.node.inputs_ref,
            prompts=tuple(self.node.slots[group] for group in groups),
            sampling=Sampling(**{**values, **changes}),
            kv=LeaseRef(lease=4, kind=Kind.ROLLOUT_KV, size_bytes=2**30),
        )

    def described(self, answers: list[Any]) -> dict[str, Any]:
        """What a unit's answers say, and how far from the trainer's log-probabilities they are."""
        groups = [one for one in answers if isinstance(one, GroupFinished)]
        (done,) = (one for one in answers if isinstance(one, UnitGenerated))
        return {
            "order": [one.responses.group for one in groups],
            "lengths": [one.responses.lengths for one in groups],
            "tokens": [one.responses.tokens.hex() for one in groups],
            "logprobs": [one.logprobs.values.hex() for one in groups],
            "stopped": [one.stopped for one in groups],
            "prefilled": sum(isinstance(one, Prefilled) for one in answers),
            "decode_steps": done.decode_steps,
            "vision_prompts": done.vision_prompts,
            "held": done.held[0].size_bytes,
            "difference": max(self.difference(one) for one in groups),
        }

    def difference(self, one: GroupFinished) -> float:
        group = FinishedGroup(
            group=one.responses.group,
            lengths=one.responses.lengths,
            tokens=np.frombuffer(one.responses.tokens, "<i4"),
            logprobs=np.frombuffer(one.logprobs.values, "<f8"),
            stopped=one.stopped,
        )
        return float(np.abs(self.node.trainer_logprobs(group) - group.logprobs).mean())


def update(rank: Rank) -> None:
    """Other weights, as a trainer would publish them."""
    rank.send(Drain, version=rank.version)
    head, gate = rank.node.parameter("lm_head.weight"), rank.node.parameter("visual.merger.mlp.2.weight")
    head.copy_(head.roll(7, 0))
    gate.neg_()
    rank.header.begin_update(rank.version)
    rank.fill()
    rank.version += 1
    rank.header.publish(rank.version, digest(rank.pages, rank.node.table, rank.total_bytes))
    rank.send(Committed, version=rank.version)


def end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def killed(rank: Rank, number: int) -> dict[str, Any]:
    """A unit in which rank 1's scheduler process is killed."""
    if number == 1:
        victims = processes("sglang::scheduler")
        threading.Timer(2.0, end, (victims,)).start()
    start = time.monotonic()
    error = ""
    try:
        rank.generate((0, 4), group_size=16, max_new_tokens=400)
    except RollplexError as found:
        error = str(found)
    return {"error": error, "seconds": time.monotonic() - start}


def run(folder: Path, number: int, device: Memory) -> dict[str, Any]:
    rank = Rank(folder, number, device)
    (loaded,) = rank.send(
        LoadRollout, model=rank.node.spec, actor=rank.ref, engine=rank.node.engine_spec, parallel=rank.parallel
    )
    found: dict[str, Any] = {"table_bytes": loaded.table_bytes == rank.total_bytes}
    found["digest"] = rank.send(DigestRequest)[0].digest == rank.header.read().digest
    found["listening"] = sorted(listening([os.getpid(), *processes()]))
    found["all"] = rank.described(rank.generate(ALL))
    found["forced"] = rank.described(
        rank.generate((0, 1, 4), max_new_tokens=40, forced_lengths=tuple([40] * 16 + [2, 1, 3, 2]))
    )
    update(rank)
    found["updated"] = rank.described(rank.generate((1, 2), temperature=0.0))
    found["killed"] = killed(rank, number)
    with contextlib.suppress(RollplexError):
        rank.service.close()
    found["left"] = [
        *processes(),
        *(path.name for path in (folder / "run").glob("sglang-*") if f"-{os.getpid()}-" in path.name),
    ]
    return found


if __name__ == "__main__":
    at, own, memory = Path(sys.argv[1]), int(sys.argv[2]), Memory(sys.argv[3])
    with kernels(memory):
        result = run(at, own, memory)
    (at / f"found.{own}.json").write_text(json.dumps(result))
    os._exit(0)  # what SGLang left half made has finalizers of its own
