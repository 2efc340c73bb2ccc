"""The ranks of test_ranks.py: four processes, each with a trainer service on a device of its own.

    python trainer_ranks.py FOLDER RANKS END

A job is a step from LoadTrainer to SaveCheckpoint, the prefix service's part done by hand over the same shards. Rank 0
of replica 0 compares what all have together with a trainer that is alone and does the same step.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rollplex.checkpoint.folder import read_manifest, verify
from rollplex.errors import RollplexError
from rollplex.layout.parallel.degrees import RolloutLayout
from rollplex.layout.parallel.transfers import target_transfers, transfers
from rollplex.layout.parameters import ParameterTable, gradient_table
from rollplex.memory.header import HeaderPage
from rollplex.memory.tensors import DTYPES, hf_views
from rollplex.model.parallel.views import place_view
from rollplex.model.weights import fill
from rollplex.protocol.common import DigestRequest
from rollplex.protocol.trainer import KeepGradients, Restore, SaveCheckpoint, SkipUpdate, Standing
from rollplex_trainer.service import TrainerService
from support.on_device import put_on_device
from support.rank_trainers import SETTINGS, Node, RankWorld, prompts_of
from support.ranks import run_ranks, wait_at_most
from support.segments import RUN_ID, HostSegments
from support.slices import sampled as rollout_slices
from support.trainer import PROMPTS, World, apply, prepare, sampled, train_all


def run(folder: Path, job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """A job: degrees, what is restored, and what goes wrong."""
    if not job.get("on_device"):
        return on_host(folder, job, rank, ranks)
    with pytest.MonkeyPatch.context() as patch:
        devices = put_on_device(patch, TrainerService)
        return {**on_host(folder, job, rank, ranks), "seen": devices.seen}


def on_host(folder: Path, job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The same; its tensors may be called those of a device."""
    node = NODES[job["number"]]
    saved = folder / f"from_{job['restore']}" / "step_1" if "restore" in job else None
    restore = None if saved is None else restored(saved)
    version = 0 if restore is None else restore.version
    world = RankWorld(node, rank, restore)
    if job.get("absent"):
        return absent(world)
    found: dict[str, Any] = {
        "table_bytes": world.loaded.table_bytes == world.own.actor.size_bytes,
        "empty": refused(world.header.read),
        "where": [world.parallel.rank, world.parallel.replica],
    }
    dist.barrier()
    found["first"] = published(world, version, first=True)
    dist.barrier()
    found["sampled first"] = differing(world, node.folder if saved is None else saved)
    if job.get("bad"):
        found["bad"] = bad_vote(world, version)
    found |= step(world, folder, restore, version)
    if job.get("again"):
        found["again"] = again(world, version + 1)
    if job.get("bad"):
        found["failing"] = failing_step(world, version + 1)
    return found


def restored(folder: Path) -> Restore:
    identity = read_manifest(folder).identity
    return Restore(folder=str(folder), version=identity.version, digest=identity.digest)


def step(world: RankWorld, folder: Path, restore: Restore | None, version: int) -> dict[str, Any]:
    """From the first suffix unit to the checkpoint."""
    name = world.node.job["name"]
    world.train(version)
    vote = prepare(world, version)
    found: dict[str, Any] = {"finite": vote.finite, "metrics": vote.metrics, "arena": hashed(world.ready.arena)}
    kept = folder / name / "gradients.bin"
    dist.barrier()  # as the coordinator, which goes on when all have voted
    if world.leads:
        kept.parent.mkdir()
        world.send(KeepGradients(cause=61, step=version, file=str(kept)))
    else:
        found["not asked"] = refused(lambda: world.send(KeepGradients(cause=61, step=version, file=str(kept))))
    dist.barrier()  # the others stand still until it has read their arenas
    applied = apply(world, version)
    found["applied"] = [applied.digest, world.header.read().state.name, world.header.read().version]
    dist.barrier()
    found["second"] = published(world, version + 1, first=False)
    found["digest"] = world.send(DigestRequest(cause=62)).digest == found["second"]["digest"]
    found["shards"] = hashed(*world.weights.values())
    found["state"] = state_of(world)
    dist.barrier()
    checkpoint = folder / f"from_{name}" / "step_1"
    if world.leads:
        save = SaveCheckpoint(cause=63, step=version + 1, version=version + 1, folder=str(checkpoint), state_json="{}")
        world.send(save)
        found["single"] = single(world, folder, restore, version, kept, checkpoint)
    dist.barrier()
    found["sampled second"] = differing(world, checkpoint)
    return found


def again(world: RankWorld, version: int) -> dict[str, Any]:
    """Another trainer in this one's place, in the middle of a step."""
    world.train(version)
    prepare(world, version)
    arena = hashed(world.ready.arena)
    digest, targets = world.header.require(version).digest, world.load.shards.targets
    before = hashed(*world.weights.values()), state_of(world)
    dist.barrier()
    meet = world.parallel.meet
    masters = list(world.ready.optimizer._state.states.get("master", {}).values())
    wrong = refused(lambda: world.replace_trainer(Standing(version=version, digest="0" * 64), f"{meet}.wrong"))
    other = ""
    if masters:
        kept = masters[-1].clone()
        masters[-1].add_(1.0)
        other = refused(lambda: world.replace_trainer(Standing(version=version, digest=digest), f"{meet}.masters"))
        masters[-1].copy_(kept)
    world.replace_trainer(Standing(version=version, digest=digest), f"{meet}.again")
    found: dict[str, Any] = {
        "refused": wrong,
        "masters": other,
        "left": (hashed(*world.weights.values()), state_of(world)) == before,
        "zeroed": not world.ready.arena.any(),
    }
    dist.barrier()
    world.train(version)
    found["finite"] = prepare(world, version).finite
    found["arena"] = hashed(world.ready.arena) == arena
    dist.barrier()
    apply(world, version)
    dist.barrier()
    found["published"] = published(world, version + 1, first=False)["header"]
    mappings = [world.segments.map_again(each.actor) for each in targets]
    pages = [HeaderPage(mapping, run_id=RUN_ID, table_hash=world.table.hash) for mapping in mappings]
    found["targets"] = [page.require(version + 1).version for page in pages]
    return found


def state_of(world: RankWorld) -> str:
    ref = world.own.state
    return hashlib.sha256(world.segments.map_again(ref).read(0, ref.size_bytes)).hexdigest()


def published(world: RankWorld, version: int, *, first: bool) -> dict[str, Any]:
    """Its answer, and whether it copied what the plan says."""
    answer, node = world.publish(version), world.node
    wanted = {"refresh": 0, "rebuild": 0}
    lists = [transfers(node.plan.devices[world.parallel.device], trained_only=not first)]
    for target in world.load.shards.targets:
        device = node.target_plan.devices[target.parallel.device]
        lists.append(target_transfers(node.plan, device, trained_only=not first))
    for transfer in (one for each in lists for one in each):
        wanted[transfer.kind] += transfer.size_bytes
    header = world.header.require(version)
    return {
        "bytes": [answer.refreshed_bytes, answer.rebuilt_bytes],
        "planned": list(wanted.values()),
        "digest": answer.digest,
        "header": header.digest == answer.digest,
    }


def differing(world: RankWorld, folder: Path) -> list[str]:
    """What this device's rollout, and those of its targets, would sample from that is not in the folder's weights."""
    node = world.node
    whole = {e.name: torch.empty(e.shape, dtype=DTYPES[world.table.dtype]) for e in world.table.entries}
    fill(world.table, whole, folder)
    model = {
        name: value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
        for name, value in hf_views(whole, world.table).items()
    }
    places = [(world.own.actor, node.plan.devices[world.parallel.device], node.rollout)]
    for target in world.load.shards.targets:
        degree = RolloutLayout(degree=target.parallel.rollout)
        places.append((target.actor, node.target_plan.devices[target.parallel.device], degree))
    wrong = []
    for ref, device, layout in places:
        expected = rollout_slices(model, node.shape, layout, device.ranks.rollout)
        numbers = node.numbers(ref)
        for parameter in device.rollout:
            value = torch.from_numpy(expected[parameter.name].copy())
            for piece in parameter.pieces:
                axis = 1 if parameter.stored.split.axis == "columns" else 0
                wanted = value.narrow(axis, piece.to[0], piece.to[1] - piece.to[0])
                seen = place_view(numbers, piece.at, parameter.name)
                seen = seen.view(torch.int16) if seen.dtype == torch.bfloat16 else seen
                if not torch.equal(seen, wanted):
                    wrong.append(f"{parameter.name} {piece.to}")
    return wrong


def single(
    world: RankWorld, folder: Path, restore: Restore | None, version: int, kept: Path, checkpoint: Path
) -> dict[str, Any]:
    """A trainer that is alone does the same step; and one is restored from the ranks' checkpoint and saves it again."""
    dtype, frozen = world.table.dtype, world.node.job.get("frozen", False)
    options: dict[str, Any] = {"freeze_vision": frozen, "optimizer": {"eps": SETTINGS.eps}}
    alone = World(world.folder, prompts_of(world.folder), HostSegments(), dtype, restore=restore, **options)
    train_all(alone, [sampled(n) for n in range(len(PROMPTS))], version=version)
    vote = prepare(alone, version)
    table = gradient_table(alone.table)
    ours = torch.frombuffer(bytearray(kept.read_bytes()), dtype=DTYPES[dtype])
    theirs = alone.service._ready.arena.clone()
    apply(alone, version)
    again = World(
        world.folder, prompts_of(world.folder), HostSegments(), dtype, restore=restored(checkpoint), **options
    )
    copy = folder / f"again_{world.node.job['name']}" / "step_1"
    again.send(SaveCheckpoint(cause=64, step=version + 1, version=version + 1, folder=str(copy), state_json="{}"))
    ready: Any = alone.service._ready
    ready_again: Any = again.service._ready
    return {
        "metrics": vote.metrics,
        "gradients": distance(ours, theirs),
        "size": len(ours) * ours.element_size() == table.total_bytes,
        "weights": distance(
            torch.cat([w.flatten() for w in again.weights.values()]),
            torch.cat([w.flatten() for w in alone.weights.values()]),
        ),
        "moved": moved(again.weights, world.folder, world.table),
        "states": {
            kind: distance(
                *(torch.cat([v.flatten() for v in r._state.states[kind].values()]) for r in (ready_again, ready))
            )
            for kind in ready._state.states
        },
        "steps": int(ready_again._state.step) == int(ready._state.step),
        "same files": verify(checkpoint).files == verify(copy).files,
        "same identity": verify(checkpoint).identity == verify(copy).identity,
    }


def moved(weights: dict[str, Tensor], folder: Path, table: ParameterTable) -> float:
    """How far the weights are from those of the model folder: what the other distances are to be small against."""
    before = {entry.name: torch.empty_like(weights[entry.name]) for entry in table.entries}
    fill(table, before, folder)
    return distance(*(torch.cat([w.flatten() for w in each.values()]) for each in (weights, before)))


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def hashed(*values: Tensor) -> str:
    state = hashlib.sha256()
    for value in values:
        state.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def refused(action: Any) -> str:
    try:
        action()
    except RollplexError as error:
        return str(error)
    return ""


def bad_vote(world: RankWorld, version: int) -> dict[str, Any]:
    """One number of one rank's prefix arena is not finite."""
    world.train(version)
    if (world.parallel.rank, world.parallel.replica) == (1, 1):
        next(iter(world.prefix_gradients.values())).view(-1)[3] = float("nan")
    vote = prepare(world, version)
    error = refused(lambda: apply(world, version))
    world.send(SkipUpdate(cause=65, step=version))
    return {
        "finite": vote.finite,
        "metrics": vote.metrics,
        "refused": error,
        "version": world.header.require(version).version,
    }


def failing_step(world: RankWorld, version: int) -> dict[str, Any]:
    """One rank's step leaves weights that are not finite."""
    world.train(version)
    prepare(world, version)
    if (world.parallel.rank, world.parallel.replica) == (0, 1):
        next(iter(world.gradients.values())).view(-1)[0] = float("inf")
    error = refused(lambda: apply(world, version))
    return {"error": error, "state": world.header.read().state.name}


def absent(world: RankWorld) -> dict[str, Any]:
    """One rank does not come to the vote."""
    dist.barrier()
    world.publish(0)
    if world.parallel.rank == 1:
        time.sleep(2.5)  # its sockets stay open: only the deadline can end the wait
        return {}
    wait_at_most(world.ready._groups.tensor, 1.0)
    prepare(world, 0)
    return {}


NODES: list[Node] = []

if __name__ == "__main__":
    given = json.loads((Path(sys.argv[1]) / "jobs.json").read_text())
    NODES += [Node(Path(sys.argv[1]), job, given["ranks"]) for job in given["jobs"]]
    sys.exit(run_ranks(run))
