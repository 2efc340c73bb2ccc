"""Two GPUs of one host, through real nodes: who is where, what is copied, and one GPU's gradients and weights.

Layouts are written as training TP x replicas / rollout TP x engines; + stands for devices of their own. The engine is
SGLang where it is installed. Each layout is started once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from rollplex.bench.parallel_report import Compared
from rollplex.bench.placement import Placement, parse_placements
from rollplex.bench.refresh_plan import device_copies
from rollplex.cli.app import run
from rollplex.config import load
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory.cuda import CudaBackend
from rollplex.nvml import Gpu, open_gpu
from support.gpu_processes import contexts_on, variables_of, worker_of
from support.nodes import Finished, Node, end_all
from support.warm import COLD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ITERATIONS = 2
NODE_S = 300.0
ALL = {"trainer", "prefix", "rollout"}
LAYOUTS = ["2x1/1x2", "2x1/2x1", "1x1+1x1"]
PLACES = {
    "2x1/1x2": [ALL, ALL],
    "2x1/2x1": [ALL, ALL],
    "1x1+1x1": [{"trainer", "prefix"}, {"rollout"}],
}
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
NOISE = 64 * 2**20
"""What the driver may take or give back by itself."""
WEIGHTS_APART = 0.5
"""Of the update: a first step of Adam moves each weight by the learning rate, in either direction where its gradient is
of the size of bfloat16's noise."""


@dataclass
class Seen:
    """A node after its iterations, while all its processes were there, and its end."""

    placement: Placement
    on: list[dict[int, str]]
    """By GPU: processes with a context there, and their roles."""
    workers: dict[int, int]
    """By process the worker that it is, or a child of."""
    variables: dict[int, dict[str, str]]
    """By process."""
    joined: dict[str, int]
    """By role and device, the pid that a worker said."""
    run: Finished


@pytest.fixture(scope="module")
def gpus() -> Iterator[tuple[Gpu, Gpu]]:
    found = open_gpu(0), open_gpu(1)
    yield found
    for gpu in found:
        gpu.close()


@pytest.fixture(scope="module")
def engine() -> str:
    return "sglang" if importlib.util.find_spec("sglang") else "transformers"


@pytest.fixture(scope="module")
def seen(
    config: Path, gpus: tuple[Gpu, Gpu], engine: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Seen]]:
    """By layout. Rollout TP 2 is started where the visibility variable has the GPUs in the other order."""
    nodes: list[Node] = []

    @cache
    def found(layout: str) -> Seen:
        (placement,) = parse_placements(layout)
        run_dir = tmp_path_factory.mktemp("r") / "r"
        command = [sys.executable, "-m", "rollplex_coordinator", "--config", str(config), "--run-dir", str(run_dir)]
        command += ["--iterations", str(ITERATIONS), "--serve"]
        for text in (*placement.overrides, f"rollout.engine={engine}"):
            command += ["--set", text]
        order = [gpu.info.uuid for gpu in (gpus[::-1] if layout == "2x1/2x1" else gpus)]
        kept = {"SPT_NOENV": "1"}  # SGLang's processes change their titles, but leave their variables to be read
        node = Node(command, run_dir, {**COLD, **kept, "CUDA_VISIBLE_DEVICES": ",".join(order)})
        nodes.append(node)
        metrics = run_dir / "metrics.jsonl"
        node.until(
            lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= ITERATIONS, "the iterations", NODE_S
        )
        on = [contexts_on(gpu) for gpu in gpus]
        workers = {pid: worker_of(pid) for one in on for pid in one}
        variables = {pid: variables_of(pid) for one in on for pid in one}
        joined = {log.stem: node.worker(log.stem) for log in (run_dir / "logs").glob("*-[01].log")}
        node.process.send_signal(signal.SIGTERM)
        ended = node.wait(NODE_S)
        assert ended.code == 0, ended.stderr
        return Seen(placement=placement, on=on, workers=workers, variables=variables, joined=joined, run=ended)

    yield found
    end_all(nodes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gpu_has_one_process_of_each_role_and_no_process_has_two_gpus(
    layout: str, seen: Callable[[str], Seen], gpus: tuple[Gpu, Gpu], engine: str
) -> None:
    """SGLang's processes are children of the rollout and count with it. A process that sees one GPU has no other."""
    found = seen(layout)
    assert len(found.run.metrics) == ITERATIONS
    assert [set(one.values()) for one in found.on] == PLACES[layout], found.on
    several = {"rollout"} if engine == "sglang" else set()
    for number, (gpu, here) in enumerate(zip(gpus, found.on, strict=True)):
        assert {role for role, times in Counter(here.values()).items() if times > 1} <= several, found.on
        workers = {found.joined.get(f"{role}-{number}") for role in set(here.values())}
        assert {found.workers[pid] for pid in here} == workers, "one of each role, the device's own"
        assert {found.variables[pid]["CUDA_VISIBLE_DEVICES"] for pid in here} == {gpu.info.uuid}
    assert set(found.on[0]).isdisjoint(found.on[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_gpu_is_shared_through_a_daemon_of_its_own(layout: str, seen: Callable[[str], Seen]) -> None:
    found = seen(layout)
    folders = [{found.variables[pid]["CUDA_MPS_PIPE_DIRECTORY"] for pid in here} for here in found.on]
    assert [len(one) for one in folders] == [1, 1]
    assert folders[0] != folders[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_of_a_device_is_on_its_gpu_whatever_the_order_of_the_visibility_variable(
    layout: str, seen: Callable[[str], Seen]
) -> None:
    found = seen(layout)
    for number, here in enumerate(found.on):
        workers = {pid for name, pid in found.joined.items() if name.endswith(f"-{number}")}
        elsewhere = {pid for name, pid in found.joined.items() if not name.endswith(f"-{number}")}
        assert elsewhere.isdisjoint(here)
        trains = {found.joined[name] for name in (f"trainer-{number}", f"prefix-{number}") if name in found.joined}
        assert trains <= set(here)
        assert trains <= workers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_multicast_is_off_in_every_process_on_a_gpu(layout: str, seen: Callable[[str], Seen]) -> None:
    for pid, variables in seen(layout).variables.items():
        assert {name: variables.get(name) for name in NO_MULTICAST} == NO_MULTICAST, pid


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_an_update_as_much_is_copied_as_planned(layout: str, seen: Callable[[str], Seen], config: Path) -> None:
    found = seen(layout)
    model = load(config, []).model
    shape = read_shape(model.path)
    table = parameter_table(shape, dtype=model.dtype, freeze_vision=model.freeze_vision)
    planned = sum(each.copied_bytes for each in device_copies(found.placement, table, shape))
    for row in found.run.metrics:
        assert row["updated"] == 1.0
        assert row.get("refreshed_bytes", 0.0) + row.get("rebuilt_bytes", 0.0) == planned
        assert {f"time/idle/0:{device}_s" for device in range(2)} <= row.keys()


@pytest.fixture(scope="module")
def compared(config: Path, engine: str, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Gradients and weights after one iteration of one GPU's responses, under two layouts, beside one GPU's noise."""
    out = tmp_path_factory.mktemp("c")
    words = ["--layouts", "2x1/1x2,1x1+1x1", "--iterations", "1", "--weights", "--out", str(out)]
    chosen = ["--set", f"rollout.engine={engine}", "--set", "optimizer.lr=0.001"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in COLD.items():
            patch.setenv(name, value)
        code = run(["bench", "parallel", str(config), *words, *chosen])
    found = msgspec.json.decode((out / "parallel.json").read_bytes(), type=Compared)
    assert code == (1 if found.exceeded else 0)
    return found


def test_the_gradient_of_two_gpus_differs_from_one_gpus_by_no_more_than_bfloat16_does(compared: Compared) -> None:
    assert compared.noise is not None
    assert compared.exceeded == (), msgspec.json.encode(compared)


def test_weights_after_the_update_are_one_gpus_within_noise(compared: Compared) -> None:
    for layout, found in compared.found.items():
        for one in found:
            assert one.weights is not None
            assert one.weights.whole < WEIGHTS_APART, layout
            assert one.weights.changed > 0.5


def test_copies_after_an_update_and_nccl_leave_the_same_bytes(tmp_path: Path) -> None:
    words = ["--device", "cuda", "--preset", "tiny-gpu", "--repeats", "3", "--out", str(tmp_path / "out")]
    assert run(["bench", "refresh", *words]) == 0
    found = json.loads((tmp_path / "out" / "refresh.json").read_text())
    assert [one.partition(" GPU-")[0] for one in found["gpus"]] == [open_name(0), open_name(1)]
    assert {one["backend"][:4] for one in found["placements"].values() if one["copies"]} == {"NCCL"}


def open_name(index: int) -> str:
    gpu = open_gpu(index)
    gpu.close()
    return gpu.info.name


_BOTH = """
import os, sys
from rollplex.memory.cuda import CudaBackend
uuid, size_bytes = sys.argv[1], int(sys.argv[2])
fd = CudaBackend(uuid=uuid).create(size_bytes, "held")
sys.stdout.write("made\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_segment_is_made_on_the_gpu_of_its_uuid_where_the_visibility_variable_reverses_them(
    gpus: tuple[Gpu, Gpu], wanted: int
) -> None:
    size = 2**30
    before = [gpu.used_bytes() for gpu in gpus]
    reverse = ",".join(gpu.info.uuid for gpu in reversed(gpus))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_BOTH), gpus[wanted].info.uuid, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": reverse, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        grown = [gpu.used_bytes() - was for gpu, was in zip(gpus, before, strict=True)]
        process.communicate()
    assert size <= grown[wanted] < size + NOISE
    assert grown[1 - wanted] < NOISE


def test_a_segment_of_each_gpu_is_read_and_written_from_the_other(gpus: tuple[Gpu, Gpu], tmp_path: Path) -> None:
    """Each process sees its own GPU alone, and its tensors say so, wherever the bytes lie."""
    lines = """
    import os, sys
    import torch
    from rollplex.memory import backend
    from rollplex.memory.tensors import tensor
    fd, size_bytes, value = (int(word) for word in sys.argv[1:])
    with backend("cuda").map(fd, size_bytes) as mapping:
        numbers = tensor(mapping, 0, (size_bytes // 2,), torch.bfloat16)
        assert numbers.device == torch.device("cuda", 0)
        before = float(numbers[12345]) if value > 1 else 0.0
        numbers.fill_(value)
        torch.cuda.synchronize()
        print(before, torch.cuda.device_count())
        del numbers
    """
    size = 8 * 2**20
    for holder in gpus:
        fd = CudaBackend(uuid=holder.info.uuid).create(size, "shared")
        try:
            said = [
                subprocess.run(
                    [sys.executable, "-c", textwrap.dedent(lines), str(fd), str(size), str(value)],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu.info.uuid, "PYTHONPATH": os.pathsep.join(sys.path)},
                    pass_fds=[fd],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    cwd=tmp_path,
                ).stdout.split()
                for value, gpu in enumerate(gpus, start=1)
            ]
        finally:
            os.close(fd)
        assert said == [["0.0", "1"], ["1.0", "1"]]
