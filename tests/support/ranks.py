"""Processes that are tensor-parallel ranks of each other: a script beside a test forks them, each runs the same jobs
and writes down what it found. And a rank's shards, cut out of the whole tensors.

    python SCRIPT FOLDER RANKS END        FOLDER/jobs.json ─► FOLDER/found.RANK.json
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from rollplex.errors import RollplexError
from rollplex.layout.parallel.plan import Parameter
from rollplex.layout.parallel.split import Split
from rollplex.model.parallel.group import TensorGroup

Found: TypeAlias = dict[str, Any]
"""By job."""


def found_by_ranks(
    script: Path, folder: Path, jobs: list[dict[str, Any]], *, ranks: int, seconds: float
) -> list[Found]:
    """What each rank has found. Fails with the log if one ends badly, or not in time."""
    end, log = time.monotonic() + seconds, folder / "log"
    numbered = [{"number": number, **job} for number, job in enumerate(jobs)]
    (folder / "jobs.json").write_text(json.dumps({"ranks": ranks, "jobs": numbered}))
    with log.open("w") as to:
        code = subprocess.call(
            [sys.executable, str(script), str(folder), str(ranks), str(end)],
            stdout=to,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=seconds + 10,
        )
    assert code == 0, log.read_text()[-6000:]
    return [json.loads((folder / f"found.{rank}.json").read_text()) for rank in range(ranks)]


def run_ranks(run: Callable[[Path, dict[str, Any], int, int], dict[str, Any]]) -> int:
    """For a script's `__main__`: 0 if all ranks end well and in time. They are forked, so that torch is imported once:
    this process has run no backward, after which a fork may not.

    Args:
        run: a job, of (folder, job, rank, ranks). What it raises of ours is what was found.
    """
    folder, ranks, end = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

    def main(rank: int) -> None:
        given, found = json.loads((folder / "jobs.json").read_text()), Found()
        for job in given["jobs"]:
            try:
                found[job["name"]] = run(folder, job, rank, ranks)
            except RollplexError as error:
                found[job["name"]] = {"error": str(error)}
            if dist.is_initialized():
                dist.destroy_process_group()  # a process meets others once in its life; the next job meets anew
        (folder / f"found.{rank}.json").write_text(json.dumps(found))

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=main, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    while any(process.exitcode is None for process in processes):
        if time.monotonic() > end or any(process.exitcode for process in processes):
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return 0 if all(process.exitcode == 0 for process in processes) else 1


def wait_at_most(group: TensorGroup, seconds: float) -> None:
    """A shorter deadline for collectives, when all have met: on a busy machine that takes its time."""
    _set_pg_timeout(timedelta(seconds=seconds), group.process_group)


def put_shards(views: Mapping[str, Tensor], parameters: Iterable[Parameter], whole: Mapping[str, Tensor]) -> None:
    """Fill a rank's parts from the whole stored tensors, which are by SGLang's names."""
    for parameter in parameters:
        part = part_of(whole[parameter.stored.name], parameter)
        start, stop = parameter.pieces[0].of
        views[parameter.name].copy_(part.narrow(axis_of(parameter.stored.split), start, stop - start))


def part_of(stored: Tensor, parameter: Parameter) -> Tensor:
    """The whole part, padding included, that a rank has a shard of."""
    split = parameter.stored.split
    number = [part.name for part in split.parts].index(parameter.name)
    first = sum(part.size for part in split.parts[:number])
    return stored.narrow(axis_of(split), first, split.parts[number].size)


def axis_of(split: Split) -> int:
    """The dimension that it is split along."""
    return 1 if split.axis == "columns" else 0
