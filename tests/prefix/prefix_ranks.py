"""The ranks of test_ranks.py: four processes, each with a prefix service over the segments of a device of its own.

    python prefix_ranks.py FOLDER RANKS END

A job runs one unit's work in a rank's service and in a service that has all of the model, in the same process, and
compares what all ranks together have with that. The trainer's part is a stand-in over the same shards.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.kv import rank_shape
from rollplex.layout.parallel.plan import DevicePlan, plan
from rollplex.layout.parallel.rank import rank_shape as share_of
from rollplex.layout.parallel.training import gradient_plan, reference_plan
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.predict import kv_bytes, prefix_activation_bytes, prefix_layers_bytes
from rollplex.memory.tensors import tensor
from rollplex.model.parallel.build import build_parallel
from rollplex.model.parallel.group import TensorGroup
from rollplex.model.parallel.views import shard_views
from rollplex.protocol.common import DigestRequest, Kind, Parallel, Responses, SegmentRef
from rollplex.protocol.prefix import Activations, Which
from rollplex_prefix.service import PrefixService
from support.inputs import write_inputs
from support.prefix import VERSION, WORKSPACE, Trainer, World, distance, weights_for
from support.ranks import axis_of, part_of, put_shards, run_ranks, wait_at_most
from support.segments import HostSegments
from support.tiny import FILM, PICTURE, PICTURES, WORDS, make_prompts

DTYPE = "float32"
DEADLINE_S = 120.0
LENGTHS = ((4, 1, 6), (2, 5, 3), (6, 6, 1), (1, 1, 1))


class RankWorld(World):
    """A service of one rank. Its segments have nothing but what its own device holds; weights that it should not read
    are NaN."""

    def __init__(self, whole: World, parallel: Parallel) -> None:
        # World's own is not called: it makes the segments of a process that has all of the model.
        self.whole, self.parallel = whole, parallel
        self.folder, self.freeze_vision, self.dtype = whole.folder, whole.freeze_vision, DTYPE
        full, self.table, self.layout = whole.shape, whole.table, TrainingLayout(degree=parallel.training)
        self.shape = rank_shape(full, parallel.training)
        self.segments = HostSegments()
        layouts = self.layout, RolloutLayout(degree=parallel.rollout)
        self.device = plan(self.table, full, *layouts).devices[parallel.device]
        self.arena_plan = gradient_plan(self.table, full, self.layout).devices[parallel.rank]
        other = reference_plan(self.table, full, self.layout).devices[parallel.rank]
        actor, segment = self._filled(Kind.ACTOR_WEIGHTS, self.device)
        self.parts = shard_views(segment, self.device.training)
        put_shards(self.parts, self.device.training, whole.weights)
        reference, segment = self._filled(Kind.REFERENCE_WEIGHTS, other)
        put_shards(shard_views(segment, other.training), other.training, whole.reference_weights)
        arena, self.arena = self._filled(Kind.GRADIENTS, self.arena_plan)
        self.pages = self.segments.map_again(actor)
        self.header = HeaderPage(self.pages, run_id=self.segments.run_id, table_hash=self.table.hash)
        self.pages.write(0, bytes(self.table.header_bytes))
        self.header.initialise(VERSION, "00" * 32)
        self.slots, self.inputs = write_inputs(self.segments, whole.prompts)
        self.kv = {}
        self.load = replace(whole.load, actor=actor, reference=reference, gradients=arena, parallel=parallel)
        self.service = PrefixService(self.segments)
        self.loaded = self.send(self.load)

    def _filled(self, kind: Kind, device: DevicePlan) -> tuple[SegmentRef, Tensor]:
        """A segment full of NaN, and all of it as numbers."""
        ref = self.segments.create(kind, device.storage.total_bytes)
        whole = tensor(self.segments.map_again(ref), 0, (ref.size_bytes // 4,), torch.float32)
        return ref, whole.fill_(float("nan"))

    @property
    def group(self) -> TensorGroup:
        """The service's own."""
        ready: Any = self.service._ready
        group: TensorGroup = ready.actor.lm_head.shard.group
        return group

    def digest(self) -> str:
        """Of the device's segment."""
        return digest(self.pages, self.table, self.device.storage.total_bytes)

    def predicted_graph(self, groups: list[int], *, layers: bool) -> int:
        """Bytes of an actor prefix of these groups, between forward and backward."""
        slots = [self.slots[group] for group in groups]
        grids = [(media.frames, media.height, media.width) for slot in slots for media in slot.media]
        longest, shape = max(slot.tokens for slot in slots), share_of(self.whole.shape, self.layout)
        rows, frozen = len(slots), self.freeze_vision
        given: dict[str, Any] = {"grids": grids, "freeze_vision": frozen, "dtype": DTYPE}
        if layers:
            return prefix_layers_bytes(shape, rows=rows, tokens=longest, **given)[0]
        return prefix_activation_bytes(shape, rows=rows, tokens=longest, **given)

    def predicted(self, groups: list[int]) -> int:
        """Bytes of a reference prefix of these groups."""
        longest = max(self.slots[group].tokens for group in groups)
        return kv_bytes(self.shape, rows=len(groups), tokens=longest, dtype=DTYPE)


class RankTrainer(Trainer):
    """The trainer's part over one rank's shards, with an arena of its own."""

    def __init__(self, world: RankWorld) -> None:
        self.world, self.group = world, world.group
        self.arena = torch.zeros_like(world.arena)
        parameters = {p.name: p for p in world.device.training}
        self.model = build_parallel(
            world.folder,
            world.whole.shape,
            world.layout,
            parameters,
            world.parts,
            gradients=shard_views(self.arena, world.arena_plan.training),
            group=world.group,
        )


def step(world: World, trainer: Trainer, groups: list[int], activations: Activations) -> dict[str, Any]:
    """A prefix unit's life: scores under the reference, actor forward, the trainer's part, backward."""
    responses = [response(group) for group in groups]
    ready = world.forward(Which.REFERENCE, groups, 7)
    scored = world.score(7, responses, release=True)
    kept = world.forward(Which.ACTOR, groups, 0, activations=activations)
    trainer.train(0, groups, responses, weights_for(responses))
    done = world.backward(0, workspace=WORKSPACE)
    kv = world.unit_views(0)
    return {
        "scores": torch.cat([torch.frombuffer(bytearray(one.values), dtype=torch.float64) for one in scored.logprobs]),
        "heads": torch.stack([*kv.keys, *kv.values, *kv.d_keys, *kv.d_values]),
        "hidden": torch.stack([kv.last_hidden, kv.d_last_hidden]),
        "held": ready.held[0].size_bytes,
        "graph": max(one.size_bytes for one in (*kept.held, *done.held)),
    }


def response(group: int) -> Responses:
    """Three samples of unequal length."""
    tokens = np.random.Generator(np.random.Philox(group)).integers(0, 64, sum(LENGTHS[group]))
    return Responses(group=group, lengths=LENGTHS[group], tokens=tokens.astype("<i4").tobytes())


def run(folder: Path, job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """What this rank has, and all of its group together, beside a service that has all of the model."""
    training, rollout, devices = job["training"], job["rollout"], max(job["training"], job["rollout"])
    inside = devices // training
    device = rank % devices
    parallel = Parallel(
        training=training,
        rollout=rollout,
        device=device,
        rank=device // inside,
        replica=rank // devices * inside + device % inside,
        replicas=ranks // training,
        meet=str(folder / f"meet.{job['number']}"),
        collective_s=DEADLINE_S,
    )
    model = folder / job["model"]
    prompts = make_prompts(model, (PICTURE, WORDS, PICTURES, FILM))
    whole = World(model, folder / f"{job['model']} reference", prompts, freeze_vision=job.get("frozen", False))
    world = RankWorld(whole, parallel)
    groups = job["groups"][parallel.replica % len(job["groups"])]
    if job.get("absent"):
        if rank == 1:
            time.sleep(2.5)  # its sockets stay open: only the deadline can end the wait
            return {}
        wait_at_most(world.group, 1.0)
        world.forward(Which.ACTOR, groups, 0)
    return compare(whole, world, groups, Activations(job.get("activations", "keep")))


def compare(whole: World, world: RankWorld, groups: list[int], activations: Activations) -> dict[str, Any]:
    single, trainer = Trainer(whole), RankTrainer(world)
    theirs, ours = (step(w, t, groups, activations) for w, t in ((whole, single), (world, trainer)))
    group = trainer.group
    heads = torch.cat(group.gather(ours["heads"]), 2)
    same = all(torch.equal(other, ours[name]) for name in ("scores", "hidden") for other in group.gather(ours[name]))
    arenas = {
        "prefix": (world.arena, whole.gradients),
        "both": (
            world.arena + trainer.arena,
            {name: value + whole.gradients[name] for name, value in single.gradients.items()},
        ),
    }
    return {
        "loaded": world.loaded.table_bytes == world.device.storage.total_bytes,
        "digest": world.send(DigestRequest(cause=1)).digest == world.digest(),
        "graph": ours["graph"] / world.predicted_graph(groups, layers=activations.by_layers),
        "held": ours["held"] == world.predicted(groups),
        "same": same,
        **{name: float((ours[name] - theirs[name]).abs().max()) for name in ("scores", "hidden")},
        "heads": float((heads - theirs["heads"]).abs().max()),
        **{name: distance(*gradients(world, group, *both)) for name, both in arenas.items()},
    }


def gradients(
    world: RankWorld, group: TensorGroup, arena: Tensor, whole: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of all ranks put together, and of the whole model, by part."""
    shards = [shard_views(other, world.arena_plan.training) for other in group.gather(arena)]
    ours, theirs = dict[str, Tensor](), dict[str, Tensor]()
    for parameter in world.arena_plan.training:
        name, split = parameter.name, parameter.stored.split
        parts = [views[name] for views in shards]
        theirs[name] = part_of(whole[parameter.stored.name], parameter)
        if split.axis == "whole":
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
        ours[name] = parts[0] if split.axis == "whole" else torch.cat(parts, axis_of(split))
    return ours, theirs


if __name__ == "__main__":
    sys.exit(run_ranks(run))
