"""The ranks of the tensor-parallel tests: processes of their own, started by test_parallel.py.

    python parallel_ranks.py FOLDER RANKS SECONDS

Each reads FOLDER/jobs.json, meets the others by a file in FOLDER, runs all jobs, and writes what they found as
FOLDER/found.RANK.json. Every rank compares the gathered gradients with those of the whole model in its own process, on
its host. With `uuids` in jobs.json each rank computes on a GPU of its own, the only one that it sees.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from model.conftest import Kit, Store, compute_exactly
from rollplex.errors import RollplexError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import DevicePlan, Parameter, plan
from rollplex.layout.parallel.split import Split
from rollplex.layout.parallel.training import gradient_plan
from rollplex.memory.tensors import DTYPES
from rollplex.model.batch import PromptBatch
from rollplex.model.decode import Decoder
from rollplex.model.device import HOST
from rollplex.model.parallel.build import build_parallel
from rollplex.model.parallel.group import Groups, TensorGroup, meet
from rollplex.model.parallel.views import shard_views
from rollplex.model.prefix import prefix_backward, prefix_forward
from rollplex.model.setup import prepare_torch
from rollplex.model.suffix import suffix_forward
from rollplex.protocol.common import Memory, ModelSpec, Parallel

CASES: dict[str, list[list[Any]]] = {
    "text": [[7], [4]],
    "images": [[2, ("image", (1, 4, 6)), 3], [1, ("image", (1, 4, 4)), 2]],
    "mixed": [[5], [2, ("image", (1, 4, 6)), 3], [1, ("video", (2, 4, 4), 0.5), 2, ("image", (1, 4, 4)), 4]],
}
DEADLINE = timedelta(seconds=60)
LENGTHS = (4, 1, 3)
TEMPERATURE, ENTROPY = 0.9, 0.3


class Rank:
    """What all jobs of this process share."""

    def __init__(self, kit: Kit, rank: int, groups: Groups, device: torch.device) -> None:
        self.kit = kit
        self.rank = rank
        self.pairs = groups
        self.device = device
        all_ranks = dist.new_group(timeout=DEADLINE)
        assert isinstance(all_ranks, dist.ProcessGroup)
        self._everyone = TensorGroup(rank=rank, size=dist.get_world_size(), process_group=all_ranks)

    def tensor_group(self, degree: int) -> TensorGroup:
        return self._everyone if degree == 4 else self.pairs.tensor


def met(us: Rank) -> dict[str, Any]:
    """Who is in the two groups of this process, by rank in the world."""
    groups = {"tensor": us.pairs.tensor, "data": us.pairs.data}
    members = {name: torch.cat(group.gather(torch.tensor([us.rank]))).tolist() for name, group in groups.items()}
    return {**members, "ranks": [group.rank for group in groups.values()]}


def run(rank: Rank, job: dict[str, Any]) -> dict[str, Any]:
    """A job: model, dtype, degree, rollout (degree), cases (one per replica), and options."""
    kit, degree = rank.kit, job["degree"]
    options = {"tied": job.get("tied", False), "frozen": job.get("frozen", False), "dtype": job["dtype"]}
    whole = kit.shared_store(job["model"], **options)
    group = rank.tensor_group(degree)
    layout = TrainingLayout(degree=degree, vision_sharded=job.get("vision_sharded", True))
    device = plan(whole.table, whole.shape, layout, RolloutLayout(degree=job.get("rollout", degree))).devices[
        group.rank
    ]
    item = whole.table.item_bytes
    numbers, dtype = device.storage.total_bytes // item, DTYPES[job["dtype"]]
    segment = torch.full((numbers,), float("nan"), dtype=dtype, device=rank.device)
    views = shard_views(segment, device.training)
    for parameter in device.training:
        take = (group.rank + 1) % degree if job.get("wrong") == parameter.name else group.rank
        views[parameter.name].copy_(shard(whole.views, parameter, layout, take))
    arena_plan = gradient_plan(whole.table, whole.shape, layout, dtype=job["dtype"]).devices[group.rank]
    arena = torch.zeros(arena_plan.storage.total_bytes // item, dtype=dtype, device=rank.device)
    gradients = shard_views(arena, arena_plan.training)
    model = build_parallel(
        whole.folder,
        whole.shape,
        layout,
        {p.name: p for p in device.training},
        views,
        gradients=gradients,
        group=group,
        fused=job.get("fused", False),
    )
    cases = job["cases"]
    mine = cases[rank.rank // degree % len(cases)]
    ours = passes(kit, model, mine, job, rank.device)
    shape = [len(CASES[mine]), whole.shape.kv_heads // degree, ours["tokens"], whole.shape.head_dim]
    if ours["keys"] != shape:
        raise AssertionError(f"keys {ours['keys']}, needed {shape}")
    if len(cases) > 1:
        rank.pairs.data.add(arena)
    wanted = passes(kit, whole.model, mine, job)
    for other in cases:
        if other != mine:
            passes(kit, whole.model, other, job)
    found = compare(kit, group, arena, arena_plan, whole)
    for name in ("logprobs", "entropy", "logits"):
        found[name] = float((ours[name] - wanted[name]).abs().max())
        everyone = group.gather(ours[name])
        found["same"] &= all(torch.equal(other, ours[name]) for other in everyone)
    found["in place"] = in_place(model, segment, arena)
    return found


def absent(us: Rank) -> dict[str, Any]:
    """The second rank of four does not come to a sum before its deadline. Raises WaitError on the others."""
    process_group = dist.new_group(timeout=timedelta(seconds=1))
    assert isinstance(process_group, dist.ProcessGroup)
    try:
        if us.rank != 1:
            TensorGroup(rank=us.rank, size=4, process_group=process_group).add(torch.ones(3))
    finally:
        dist.barrier()
    return {}


def passes(kit: Kit, model: Any, case: str, job: dict[str, Any], device: torch.device = HOST) -> dict[str, Any]:
    """Prefix, suffix and prefix backward, as the two services do it, then two steps of decoding. Results are in host
    memory."""
    name, dtype = job["model"], DTYPES[job["dtype"]]
    samples = [kit.sample(parts, seed, name) for seed, parts in enumerate(CASES[case])]
    tokens, lengths = kit.responses(LENGTHS * len(samples), 7)
    weight = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
    batch = on(kit.batch(samples), device)
    tokens, lengths, weight = tokens.to(device), lengths.to(device), weight.to(device)
    state = prefix_forward(model, batch, grad=True, layers=job.get("layers", False))
    leaves = kit.leaves(state)
    out = suffix_forward(model, leaves, tokens, lengths, temperature=TEMPERATURE, never_sampled=kit.NEVER, entropy=True)
    if out.entropy is None:
        raise AssertionError("no entropy")
    loss: Any = ((out.logprobs + ENTROPY * out.entropy) * weight).sum()
    loss.backward()
    gradients: Any = ([k.grad for k in leaves.keys], [v.grad for v in leaves.values], leaves.last_hidden.grad)
    prefix_backward(state, gradients[0], gradients[1], gradients[2])
    still = prefix_forward(model, batch, grad=False)
    decoder = Decoder(model, still, 1, 2)
    logits = torch.stack([decoder.first_logits(), decoder.step(tokens[:: len(LENGTHS), 0])])
    return {
        "logprobs": out.logprobs.detach().to(HOST),
        "entropy": out.entropy.detach().to(HOST),
        "logits": logits.to(HOST),
        "keys": list(state.keys[0].shape),
        "tokens": batch.tokens,
    }


def on(batch: PromptBatch, device: torch.device) -> PromptBatch:
    """The batch there."""
    return replace(
        batch,
        ids=batch.ids.to(device),
        positions=batch.positions.to(device),
        lengths=batch.lengths.to(device),
        next_positions=batch.next_positions.to(device),
        pixel_rows=None if batch.pixel_rows is None else batch.pixel_rows.to(device),
    )


def shard(stored: dict[str, Tensor], parameter: Parameter, layout: TrainingLayout, rank: int) -> Tensor:
    """What `rank` should hold of a part, cut out of the whole stored tensor."""
    split = parameter.stored.split
    number = [part.name for part in split.parts].index(parameter.name)
    start, stop = layout.shard(split, split.parts[number], rank)
    return part_of(stored[split.entry.name], split, number).narrow(axis(split), start, stop - start)


def part_of(stored: Tensor, split: Split, number: int) -> Tensor:
    """A part of a stored tensor, padding included."""
    first = sum(part.size for part in split.parts[:number])
    return stored.narrow(axis(split), first, split.parts[number].size)


def axis(split: Split) -> int:
    return 1 if split.axis == "columns" else 0


def compare(kit: Kit, group: TensorGroup, arena: Tensor, device: DevicePlan, whole: Store) -> dict[str, Any]:
    """Gradients of all ranks put together, against those of the whole model."""
    arenas = [shard_views(other.to(HOST), device.training) for other in group.gather(arena)]
    ours, theirs, same = dict[str, Tensor](), dict[str, Tensor](), True
    for parameter in device.training:
        split, name = parameter.stored.split, parameter.name
        parts = [views[name] for views in arenas]
        number = [part.name for part in split.parts].index(name)
        theirs[name] = part_of(whole.gradients[split.entry.name], split, number)
        if parts[0].shape == theirs[name].shape:
            same &= all(torch.equal(part, parts[0]) for part in parts)
            ours[name] = parts[0]
        else:
            ours[name] = torch.cat(parts, axis(split))
    worst = {
        name: kit.distance({name: ours[name]}, {name: theirs[name]}) if theirs[name].any() else 0.0 for name in ours
    }
    zero = [name for name in theirs if not theirs[name].any() and ours[name].any()]
    return {
        "gradients": kit.distance(ours, theirs),
        "worst": max(worst, key=lambda name: worst[name]),
        "parts": len(ours),
        "not zero": zero,
        "same": same,
    }


def in_place(model: Any, segment: Tensor, arena: Tensor) -> bool:
    """Every parameter and every gradient is memory of the segments."""
    found = []
    for parameter in model.parameters():
        for tensor, whole in ((parameter, segment), (parameter.grad, arena)):
            if tensor is not None:
                found.append(whole.data_ptr() <= tensor.data_ptr() < whole.data_ptr() + whole.nbytes)
    return all(found)


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    given = json.loads((folder / "jobs.json").read_text())
    device = HOST
    if "uuids" in given:
        os.environ["CUDA_VISIBLE_DEVICES"] = given["uuids"][rank]
        spec = ModelSpec(path="", dtype="float32", freeze_vision=False, table_hash="", never_sampled=())
        device = prepare_torch(msgspec.structs.replace(spec, device=Memory.CUDA))
    place = Parallel(
        training=2,
        rank=rank % 2,
        replica=rank // 2,
        replicas=ranks // 2,
        meet=str(folder / "meet"),
        collective_s=DEADLINE.total_seconds(),
    )
    kit = Kit(lambda name, tied: Path(given["folders"][f"{name} {tied}"]))
    us, found = Rank(kit, rank, meet(place, 2, device), device), dict[str, Any]()
    for job in given["jobs"]:
        if job.get("exact"):
            compute_exactly(setattr)
        try:
            found[job["name"]] = {"met": met, "absent": absent}[job["name"]](us) if "model" not in job else run(us, job)
        except RollplexError as error:
            found[job["name"]] = {"error": str(error)}
    (folder / f"found.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def start(folder: Path, ranks: int, seconds: float) -> int:
    """Runs `main` in as many processes; 0 if all end well and in time. They are forked, so that torch is imported once:
    this process has run no backward, after which a fork may not."""
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=main, args=(folder, rank, ranks), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    while any(process.exitcode is None for process in processes):
        if time.monotonic() > end or any(process.exitcode for process in processes):
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return 0 if all(process.exitcode == 0 for process in processes) else 1


if __name__ == "__main__":
    sys.exit(start(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
