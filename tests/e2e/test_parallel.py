"""Several devices through real processes: one device's gradients, one storage under two layouts, and what goes wrong.

Layouts are written as training TP x replicas / rollout TP x engines. Five iterations of each are `rollplex bench
parallel`; here each goes on once from the one device's checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollplex.bench.gradient_files import difference
from rollplex.config import load
from rollplex.config.yaml_text import dumps
from rollplex.demo.digits import write_digits
from rollplex.demo.recipe import make_config
from rollplex.journal.events import (
    ErrorRaised,
    LeaseGranted,
    LeaseReleased,
    ServiceDied,
    ServiceStarted,
    UpdateCommitted,
    WeightsLoaded,
    WorkersRestarted,
    WorkersRestarting,
)
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.layout.parameters import gradient_table, parameter_table
from rollplex.layout.shape import read_shape
from rollplex.presets import TINY_WIDE, write_preset
from rollplex.protocol.common import Device, Kind
from rollplex_coordinator.planning.answer import answer
from rollplex_coordinator.planning.question import Question
from support.layouts import check_contents
from support.nodes import Finished, Node, Project, Start
from support.several import placement, timeless, weights_segments, whole_model

pytestmark = pytest.mark.timeout(300)  # whichever test comes first starts the node that others go on from

GRADIENTS_APART = 1e-5
LAYOUTS = {"4x1/2x2": (4, 2), "2x2/1x4": (2, 1), "1x4/2x2": (1, 2)}
KEPT = {
    "run.schedule": "serial",
    "run.log_tokens": True,
    "run.log_completions": 1000,
    "run.keep_gradients": True,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
    "batching.decode_prompts": 1,
}
STANDING = (Kind.ACTOR_WEIGHTS, Kind.REFERENCE_WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE)
UNITS = (Kind.ACTOR_PREFIX_KV, Kind.PREFIX_ACTIVATIONS)
"""Of one prefix unit: as many as wait for their backward are held at once."""
IMAGE_TOKENS = 4
"""Of a digit."""
OnDevices = Callable[..., Node]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Two digits, and rows without pictures between them; a model with four heads of keys and values."""
    folder = tmp_path_factory.mktemp("wide")
    write_digits(folder / "data", digits=(0, 1))
    pictures = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    texts = [
        {"prompt": [{"role": "user", "content": f"which digit comes after {n}"}], "images": [], "answer": str(n + 1)}
        for n in range(4)
    ]
    first = [row for pair in zip(texts[:2], pictures[:2], strict=True) for row in pair]
    swapped = [row for pair in zip(pictures[2:4], texts[2:], strict=True) for row in pair]
    lines = [json.dumps(row) for row in (*first, *swapped)]
    (folder / "data" / "mixed.jsonl").write_text("\n".join(lines) + "\n")
    write_preset(TINY_WIDE.name, folder / "model")
    config = make_config(quick=True)
    config["eval"] = []
    (folder / "config.yaml").write_text(dumps(config), encoding="utf-8")
    return Project(folder, folder / "config.yaml")


@pytest.fixture(scope="module")
def on_devices(start: Start, wide: Project) -> OnDevices:
    """`start` with that model, and overrides as keywords with __ for a dot."""

    def begin(*arguments: str, run_dir: Path | None = None, **overrides: Any) -> Node:
        given = {name.replace("__", "."): value for name, value in overrides.items()}
        return start(*arguments, config=wide.config, run_dir=run_dir, overrides={"batching.decode_prompts": 1, **given})

    return begin


@pytest.fixture(scope="module")
def one(start: Start, wide: Project) -> Finished:
    """Two iterations on one device."""
    run = start("--iterations", "2", config=wide.config, overrides=KEPT).wait()
    assert run.code == 0, run.stderr
    return run


def going_on(one: Finished, run_dir: Path, step: int = 1) -> list[str]:
    """Arguments of a run in a fresh directory that goes on from the one device's checkpoint."""
    shutil.copytree(one.run_dir / "checkpoints" / f"step_{step}", run_dir / "checkpoints" / f"step_{step}")
    run_dir.chmod(0o700)
    accepted = [word for key in ("parallel", "rollout", "batching") for word in ("--accept", key)]
    return ["--resume", *accepted]


def replaying(one: Finished) -> dict[str, object]:
    return {"rollout.engine": "replay", "rollout.replay": str(one.run_dir / "completions.jsonl")}


def apart(one: Path, other: Path, wide: Project, step: int) -> float:
    """Norm of the difference of two kept gradients, over the norm of the first."""
    table = gradient_table(parameter_table(read_shape(wide.folder / "model"), dtype="float32", freeze_vision=False))
    files = [run / "gradients" / f"step_{step}.bin" for run in (one, other)]
    return difference(files[0], files[1], table).whole


@dataclass
class Resumed:
    """A node under a layout that went on from the one device's checkpoint for one iteration, with its responses."""

    training: int
    rollout: int
    run: Finished
    digests: list[dict[str, Any]]
    weights: dict[Device, NDArray[np.uint8]]
    """After the update, by device."""


@pytest.fixture(scope="module")
def resumed(
    one: Finished, start: Start, wide: Project, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Resumed]:
    """By layout; each is started once."""

    @cache
    def found(layout: str) -> Resumed:
        training, rollout = LAYOUTS[layout]
        run_dir = tmp_path_factory.mktemp("layout") / "r"
        arguments = [*going_on(one, run_dir), "--iterations", "2", "--serve"]
        overrides = {**KEPT, **replaying(one), **placement(training, rollout)}
        node = start(*arguments, config=wide.config, run_dir=run_dir, overrides=overrides)
        node.until((run_dir / "checkpoints" / "step_2").exists, "the checkpoint of the iteration")
        with node.api() as api:
            digests = api.post("/services/digests", json={}).json()["digests"]
        weights = weights_segments(node)
        node.process.send_signal(signal.SIGTERM)
        run = node.wait()
        assert run.code == 0, run.stderr
        return Resumed(training=training, rollout=rollout, run=run, digests=digests, weights=weights)

    return found


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_an_iteration_from_the_one_devices_weights_with_its_responses_has_its_gradients(
    layout: str, resumed: Callable[[str], Resumed], one: Finished, wide: Project
) -> None:
    assert apart(one.run_dir, resumed(layout).run.run_dir, wide, 1) < GRADIENTS_APART


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_after_an_update_both_layouts_read_their_slices_of_the_whole_weights_byte_for_byte(
    layout: str, resumed: Callable[[str], Resumed], wide: Project
) -> None:
    found, shape = resumed(layout), read_shape(wide.folder / "model")
    degrees = TrainingLayout(degree=found.training), RolloutLayout(degree=found.rollout)
    group = plan(parameter_table(shape, dtype="float32", freeze_vision=False), shape, *degrees)
    model = whole_model(found.run.run_dir / "checkpoints" / "step_2")
    size = len(group.devices)
    for first in range(0, 4, size):
        contents = [found.weights[Device(index=first + n)] for n in range(size)]
        copied = check_contents(group, contents, model, shape)
        assert (copied > 0) == (found.training > found.rollout)
        assert found.run.metrics[-1]["refreshed_bytes"] == copied * (4 // size)
    by_device: dict[str, set[str]] = {}
    for digest in found.digests:
        assert digest["version"] == 2
        by_device.setdefault(digest["service"].partition("[")[2], set()).add(digest["digest"])
    assert len(by_device) == 4
    assert all(len(seen) == 1 for seen in by_device.values()), "processes of a device map one segment"


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_what_rollplex_plan_says_of_a_device_is_what_the_run_leased_there(
    layout: str, resumed: Callable[[str], Resumed], wide: Project
) -> None:
    found = resumed(layout)
    config = load(found.run.run_dir / "config.yaml", [f"model.path={wide.folder / 'model'}"])
    prompt = int(found.run.metrics[-1]["prompts/max_length"])
    question = Question(
        config=config,
        shape=read_shape(wide.folder / "model"),
        model=TINY_WIDE.name,
        gpus=4,
        training=found.training,
        rollout=found.rollout,
        rollout_gpus=0,
        hbm_bytes=2**34,
        prompt_tokens=prompt,
        image_tokens=IMAGE_TOKENS,
    )
    (placed,) = [held for held in answer(question.checked()).placements if held.name == "rollplex"]
    (device,) = placed.devices
    planned = next(phase.by_kind for phase in device.phases if phase.phase == "TRAIN")
    leased: dict[tuple[Kind, Device], dict[str, int]] = {}
    for lease in found.run.of(LeaseGranted):
        largest = leased.setdefault((lease.kind, lease.device), {})
        key = str(lease.lease) if lease.kind in STANDING else "unit"
        largest[key] = max(lease.size_bytes, largest.get(key, 0))
    for index in range(4):
        held = {kind: sum(leased[kind, Device(index=index)].values()) for kind in (*STANDING, *UNITS)}
        bounds = {kind: planned[kind] for kind in held}
        assert held[Kind.PREFIX_ACTIVATIONS] <= bounds.pop(Kind.PREFIX_ACTIVATIONS)  # pictures of any shape
        assert {kind: held[kind] for kind in bounds} == bounds


@pytest.fixture(scope="module")
def tensor_parallel(on_devices: OnDevices) -> dict[str, Finished]:
    """The same two iterations on two ranks that sample and train together, under each schedule."""
    runs = {
        schedule: on_devices(
            "--iterations",
            "2",
            run__schedule=schedule,
            run__log_tokens=True,
            run__log_completions=1000,
            **placement_words(2, 2, 2),
        ).wait()
        for schedule in ("serial", "overlap", "stream")
    }
    for run in runs.values():
        assert run.code == 0, run.stderr
    return runs


def placement_words(training: int, rollout: int, devices: int) -> dict[str, Any]:
    return {name.replace(".", "__"): value for name, value in placement(training, rollout, devices).items()}


def test_schedules_leave_bitwise_equal_weights_on_two_ranks(tensor_parallel: dict[str, Finished]) -> None:
    serial = tensor_parallel["serial"]
    for run in tensor_parallel.values():
        assert run.checkpoint() == serial.checkpoint()
        assert [e.digest for e in run.of(UpdateCommitted)] == [e.digest for e in serial.of(UpdateCommitted)]
        assert [timeless(row) for row in run.metrics] == [timeless(row) for row in serial.metrics]


def test_ranks_sample_on_policy_what_one_device_samples(tensor_parallel: dict[str, Finished], one: Finished) -> None:
    run = tensor_parallel["serial"]
    for row in run.metrics:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["updated"] == 1.0
    rows, alone = (
        [json.loads(line) for line in (found.run_dir / "completions.jsonl").read_text().splitlines()]
        for found in (run, one)
    )
    first = [(row["group"], row["ids"]) for row in rows if row["step"] == 0]
    assert first == [(row["group"], row["ids"]) for row in alone if row["step"] == 0]
    assert all(0 <= token < 448 for row in rows for token in row["ids"])


def test_private_memory_of_each_rank_is_within_five_per_cent_of_its_lease(
    tensor_parallel: dict[str, Finished],
) -> None:
    measured = [
        lease for run in tensor_parallel.values() for lease in run.of(LeaseReleased) if lease.held_bytes is not None
    ]
    kinds = {Kind.ROLLOUT_KV, Kind.REFERENCE_PREFIX_KV, Kind.PREFIX_ACTIVATIONS, Kind.WORKSPACE}
    assert {(lease.kind, lease.device.index) for lease in measured} == {(kind, n) for kind in kinds for n in range(2)}
    for lease in measured:
        assert lease.held_bytes is not None
        assert abs(lease.held_bytes - lease.size_bytes) <= 0.05 * lease.size_bytes, lease


def test_a_checkpoint_of_several_devices_goes_on_under_one_and_is_the_same_files(
    tensor_parallel: dict[str, Finished], one: Finished, start: Start, wide: Project, tmp_path: Path
) -> None:
    several, run_dir = tensor_parallel["serial"], tmp_path / "r"
    arguments = [*going_on(several, run_dir, 2), "--iterations", "3"]
    alone = start(*arguments, config=wide.config, run_dir=run_dir, overrides={"batching.decode_prompts": 1}).wait()
    assert alone.code == 0, alone.stderr
    assert [commit.version for commit in alone.of(UpdateCommitted)] == [3]
    assert {name: len(content) for name, content in alone.checkpoint().items()} == {
        name: len(content) for name, content in one.checkpoint().items()
    }


def test_replicas_one_with_texts_and_one_with_pictures_have_the_single_processs_gradients(
    start: Start, wide: Project
) -> None:
    mixed = {**KEPT, "data.path": str(wide.folder / "data" / "mixed.jsonl"), "data.shuffle": False}
    single = start("--iterations", "2", config=wide.config, overrides=mixed).wait()
    assert single.code == 0, single.stderr
    overrides = {**mixed, **replaying(single), **placement(1, 1, 2)}
    pair = start("--iterations", "2", config=wide.config, overrides=overrides).wait()
    assert pair.code == 0, pair.stderr
    for step in range(2):  # the second has the kinds swapped
        assert apart(single.run_dir, pair.run_dir, wide, step) < GRADIENTS_APART


def test_rollout_on_devices_of_its_own_ends_with_the_colocated_weights_and_leaves_them_idle(
    on_devices: OnDevices, wide: Project
) -> None:
    """The colocated run is evaluated too, by both engines, which changes nothing."""
    split = {"parallel__placement": "disaggregated", "parallel__rollout_devices": 2}
    held_out = {"data": str(wide.folder / "data" / "held_out.jsonl"), "every": 1, "limit": 7}
    together = on_devices("--iterations", "2", eval=held_out, **placement_words(2, 1, 2)).wait()
    apart_ = on_devices("--iterations", "2", **placement_words(2, 1, 4), **split).wait()
    for run in (together, apart_):
        assert run.code == 0, run.stderr
    assert apart_.checkpoint() == together.checkpoint()
    assert [(row["step"], row["count"]) for row in together.evals] == [(0, 7.0), (1, 7.0), (2, 7.0)]
    for row in apart_.metrics:
        assert row["rebuilt_bytes"] > 0
        assert all(row[f"time/idle/0:{device}_s"] > 0.0 for device in range(4))
    roles = {(event.service.partition("[")[0], event.service) for event in apart_.of(ServiceStarted)}
    assert {service for role, service in roles if role == "rollout"} == {"rollout[0:2]", "rollout[0:3]"}
    assert {service for role, service in roles if role == "trainer"} == {"trainer[0:0]", "trainer[0:1]"}


def test_after_the_death_of_a_rank_all_ranks_start_again_and_a_second_one_ends_the_run_by_its_device(
    on_devices: OnDevices, tensor_parallel: dict[str, Finished]
) -> None:
    node = on_devices(
        "--serve",
        run__schedule="serial",
        run__log_tokens=True,
        run__log_completions=1000,
        run__restarts=1,
        **placement_words(2, 2, 2),
    )
    with node.api() as api:
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "idleness")
        services = {service["service"]: service for service in api.get("/services").json()}
        os.kill(services["trainer[0:0]"]["pid"], signal.SIGSTOP)  # so that the run stays in TRAIN
        api.post("/iterations", json={"count": 2}).raise_for_status()
        node.until(lambda: api.get("/status").json()["phase"] == "TRAIN", "TRAIN")
        os.kill(services["prefix[0:1]"]["pid"], signal.SIGKILL)
        node.until_iterations(2)
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "idleness")
        services = {service["service"]: service for service in api.get("/services").json()}
    os.kill(services["prefix[0:1]"]["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    node.until(lambda: "error:" in node.stderr or node.process.poll() is not None, "an error", 5.0)
    assert time.monotonic() - killed_s < 5.0
    done = node.wait(20)
    assert done.code == 1
    _, _, text = done.stderr.partition("error:")
    assert "the prefix service of device 0:1 died" in text
    assert "killed by SIGKILL" in text
    assert "run.restarts is 1" in text
    assert [(died.role, died.service) for died in done.of(ServiceDied)] == [("prefix", "prefix[0:1]")] * 2
    assert len(done.of(ErrorRaised)) == 1
    (restarting,), (restarted,) = done.of(WorkersRestarting), done.of(WorkersRestarted)
    assert (restarting.service, restarting.phase, restarting.step) == ("prefix[0:1]", "TRAIN", 0)
    (loaded,) = done.of(WeightsLoaded)
    assert (restarted.version, restarted.digest) == (0, loaded.digest)
    serial = tensor_parallel["serial"]
    assert [e.digest for e in done.of(UpdateCommitted)] == [e.digest for e in serial.of(UpdateCommitted)]
    assert [timeless(row) for row in done.metrics] == [timeless(row) for row in serial.metrics]
