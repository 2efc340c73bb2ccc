"""The ranks of test_ranks.py: four processes, each with a rollout service over the segment of a device of its own.

    python rollout_ranks.py FOLDER RANKS END

A job samples one unit in a rank's service, and in an engine that has all of the model, in the same process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.conftest import Node, Run
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.parts import rollout_parts
from rollplex.layout.parallel.plan import plan
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.tensors import tensor, views
from rollplex.model.parallel.group import TensorGroup
from rollplex.model.parallel.views import shard_views
from rollplex.protocol.common import DigestRequest, Kind, LeaseRef, Parallel
from rollplex.protocol.rollout import GenerateUnit, GroupFinished, LoadRollout, UnitGenerated
from rollplex_rollout.service import RolloutService
from rollplex_rollout.transformers_engine import TransformersEngine
from support.ranks import put_shards, run_ranks, wait_at_most

DEADLINE_S = 120.0
VERSION = 5
STEP = 2
SAMPLING = {"stop_ids": tuple(range(0, 64, 5)), "max_new_tokens": 12}


class Rank:
    """A service of one rank, loaded. What its device's segment has beside the rank's rollout shards is NaN."""

    def __init__(self, node: Node, parallel: Parallel) -> None:
        self.node, self.parallel = node, parallel
        layouts = TrainingLayout(degree=parallel.training), RolloutLayout(degree=parallel.rollout)
        device = plan(node.table, node.shape, *layouts).devices[parallel.device]
        self.total_bytes = device.storage.total_bytes
        ref = node.segments.create(Kind.ACTOR_WEIGHTS, self.total_bytes)
        self.pages = node.segments.map_again(ref)
        numbers = tensor(self.pages, 0, (ref.size_bytes // 4,), torch.float32).fill_(float("nan"))
        parts = rollout_parts(device)
        put_shards(shard_views(numbers, parts), parts, views(node.actor, node.table))
        self.pages.write(0, bytes(node.table.header_bytes))
        header = HeaderPage(self.pages, run_id=node.segments.run_id, table_hash=node.table.hash)
        header.initialise(VERSION, digest(self.pages, node.table, self.total_bytes))
        self.digest = header.read().digest
        self.service = RolloutService(node.segments)
        (self.loaded,) = self.send(LoadRollout(cause=1, model=node.spec, actor=ref, parallel=parallel))

    def send(self, message: Any) -> list[Any]:
        """The answers to an instruction."""
        answers = list[Any]()
        self.service.handle(message, answers.append)
        return answers

    @property
    def engine(self) -> TransformersEngine:
        loaded: Any = self.service._loaded
        engine: TransformersEngine = loaded.engine
        return engine

    @property
    def group(self) -> TensorGroup:
        head: Any = self.engine._model.lm_head
        group: TensorGroup = head.shard.group
        return group

    def generate(self, groups: list[int], lease_bytes: int) -> tuple[list[GroupFinished], UnitGenerated]:
        """What a unit's groups and its end say."""
        *told, done = self.send(
            GenerateUnit(
                cause=2,
                step=STEP,
                version=VERSION,
                unit=0,
                inputs=self.node.inputs_ref,
                prompts=tuple(self.node.slots[group] for group in groups),
                sampling=self.node.sampling(**SAMPLING),
                kv=LeaseRef(lease=4, kind=Kind.ROLLOUT_KV, size_bytes=lease_bytes),
            )
        )
        return [message for message in told if isinstance(message, GroupFinished)], done


def run(folder: Path, job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """What this rank sampled, beside one engine with all of the model."""
    training, rollout = job["training"], job["rollout"]
    devices = max(training, rollout)
    engines, device = devices // rollout, rank % devices
    parallel = Parallel(
        training=training,
        rollout=rollout,
        device=device,
        rank=device // engines,
        replica=rank // devices * engines + device % engines,
        replicas=ranks // rollout,
        meet=str(folder / f"meet.{job['number']}"),
        collective_s=DEADLINE_S,
    )
    node = Node(folder / job["model"], None)
    ours = Rank(node, parallel)
    groups = job["groups"][parallel.replica % len(job["groups"])]
    unit = node.unit(groups, step=STEP, **SAMPLING)
    if job.get("absent"):
        if rank == 1:
            time.sleep(2.5)  # its sockets stay open: only the deadline can end the wait
            return {}
        wait_at_most(ours.group, 1.0)
        ours.generate(groups, 2**30)
    return compare(ours, Run(TransformersEngine(node.setup), unit), groups)


def compare(ours: Rank, whole: Run, groups: list[int]) -> dict[str, Any]:
    unit = ours.node.unit(groups, step=STEP, **SAMPLING)
    predicted = ours.engine.kv_bytes(unit)
    finished, done = ours.generate(groups, predicted)
    said = b"".join(one.responses.tokens + one.logprobs.values for one in finished)
    mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    everyone = ours.group.gather(mine)
    theirs = [whole.by_group[one.responses.group] for one in finished]
    gaps = [np.abs(_numbers(one) - other.logprobs).max() for one, other in zip(finished, theirs, strict=True)]
    reply = ours.send(DigestRequest(cause=3))[0]  # looks whether all parameters lie in the segment, too
    return {
        "loaded": ours.loaded.table_bytes == ours.total_bytes,
        "digest": reply.digest == ours.digest,
        "order": [one.responses.group for one in finished] == [group.group for group in whole.groups],
        "lengths": [one.responses.lengths for one in finished] == [other.lengths for other in theirs],
        "stopped": [one.stopped for one in finished] == [other.stopped for other in theirs],
        "tokens": [one.responses.tokens for one in finished] == [other.tokens.tobytes() for other in theirs],
        "different": len({length for one in finished for length in one.responses.lengths}),
        "logprobs": float(max(gaps)),
        "same": all(torch.equal(other, mine) for other in everyone),
        "held": done.held[0].size_bytes == predicted,
        "share": predicted / whole.report.kv_bytes,
        "steps": done.decode_steps == whole.report.decode_steps,
        "vision": done.vision_prompts == whole.report.vision_prompts,
    }


def _numbers(finished: GroupFinished) -> NDArray[np.float64]:
    return np.frombuffer(finished.logprobs.values, "<f8")


if __name__ == "__main__":
    sys.exit(run_ranks(run))
