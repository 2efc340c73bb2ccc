"""compose.yaml with a real engine: four containers, descriptors through a shared volume, HTTP, nothing left behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollplex.config.yaml_text import dumps
from rollplex.demo.digits import write_digits
from rollplex.demo.recipe import make_config
from rollplex.presets import TINY, write_preset
from support.compose import (
    ROOT,
    SERVICES,
    TAG,
    WORKERS,
    Node,
    base_image,
    command_output,
    find_compose,
    succeeds,
)
from support.promql import dashboard, iteration_metrics, queries

# Wheels and images are made once; on two busy cores that takes minutes.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
BUILD_S = 540.0
ITERATIONS = 5


@pytest.fixture(scope="module")
def compose() -> tuple[str, ...]:
    """Compose's command, where an engine answers."""
    if not succeeds("docker", "info"):
        pytest.skip("no Docker engine answers (docker info)")
    command = find_compose()
    if command is None:
        pytest.skip("neither docker compose nor docker-compose is there")
    return command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two digits, the tiny model and a configuration, readable by the containers' user."""
    folder = tmp_path_factory.mktemp("compose") / "digits"
    write_digits(folder / "data", digits=(0, 1))
    write_preset(TINY.name, folder / "model")
    config = make_config(quick=True)
    config |= {"eval": [], "data": {"path": "data/train.jsonl", "prompts_per_iteration": 4}, "checkpoint": {"every": 2}}
    (folder / "config.yaml").write_text(dumps(config), encoding="utf-8")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
def images(compose: tuple[str, ...], folder: Path) -> Node:
    """The four images, built; a project that has not been started."""
    base = base_image()
    command_output(str(ROOT / "deploy" / "build-wheels.sh"), "--if-needed", deadline_s=BUILD_S)
    env = {"ROLLPLEX_BASE": base, "ROLLPLEX_TAG": TAG, "ROLLPLEX_PROJECT": str(folder), "ROLLPLEX_PORT": "0"}
    env["ROLLPLEX_GRACE"] = "60s"  # a test that goes wrong must not wait for ten minutes
    node = Node(compose, f"rollplex-test-{os.getpid()}-{secrets.token_hex(3)}", env)
    node.run("build", deadline_s=BUILD_S)
    return node


@pytest.fixture
def node(images: Node) -> Iterator[Node]:
    """The project, started."""
    try:
        images.run("up", "--detach", "--no-build", deadline_s=120)
        yield images
    finally:
        images.run("down", "--volumes", deadline_s=90)


def test_the_images_of_the_workers_share_all_but_their_own_package_and_the_coordinator_has_no_torch(
    images: Node,
) -> None:
    layers = {
        service: json.loads(command_output("docker", "inspect", f"rollplex-{service}:{TAG}"))[0]["RootFS"]["Layers"]
        for service in SERVICES
    }
    shared = layers["rollout"][:-2]
    assert len(shared) >= 3  # the base, the libraries, the user
    assert all(layers[worker][:-2] == shared for worker in WORKERS)
    entry = "--entrypoint=/opt/rollplex/bin/python"
    find = "import importlib.util as u; print([u.find_spec(n) is not None for n in ('torch', 'rollplex_%s', '%s')])"
    for service, torch, other in (("coordinator", False, "rollplex_trainer"), ("trainer", True, "rollplex_rollout")):
        code = find % (service, other)
        run = ("docker", "run", "--rm", "--network=none", entry, f"rollplex-{service}:{TAG}", "-c", code)
        assert command_output(*run).strip() == str([torch, True, False]), service


def test_five_iterations_through_four_containers_started_and_stopped_by_http(node: Node) -> None:
    with node.api() as api:
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "loaded node", 180)
        assert {s["service"] for s in api.get("/services").json()} >= {f"{worker}[0:0]" for worker in WORKERS}
        check_isolation(node)
        before = api.post("/services/digests", json={}).json()
        api.post("/iterations", json={"count": ITERATIONS}).raise_for_status()
        every = list(range(ITERATIONS))
        node.until(lambda: committed(api.get("/iterations").json()) == every, "committed iterations", 120)
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "idleness", 60)
        after = api.post("/services/digests", json={}).json()
        check_dashboard(api.get("/metrics").text)
        check_one_copy(node, before, after)
        node.until(lambda: set(health(node).values()) == {"healthy"}, "health of all", 60)
        api.post("/stop", json={"when": "after_iteration", "exit": True}).raise_for_status()
    node.until(lambda: None not in node.exit_codes().values(), "end of all containers", 60)
    assert node.exit_codes() == dict.fromkeys(SERVICES, 0), node.run("logs")
    assert all(node.left().values())
    node.run("down", "--volumes", deadline_s=90)
    assert node.left() == {"containers": [], "volumes": [], "networks": []}


def check_dashboard(exposition: str) -> None:
    """What it asks of an iteration is what a run says of one."""
    asked = {m["name"] for q in queries(dashboard()) for n, m in q.metrics.items() if n == "rollplex_iteration_metric"}
    assert asked <= iteration_metrics(exposition)


def health(node: Node) -> dict[str, str]:
    return {service: node.inspect(service)["State"]["Health"]["Status"] for service in SERVICES}


def committed(iterations: list[dict[str, object]]) -> list[object]:
    return [iteration["step"] for iteration in iterations if iteration["state"] == "committed"]


def check_isolation(node: Node) -> None:
    """As the engine sees the running containers: nothing shared but the run volume, no rights."""
    for service in SERVICES:
        found = node.inspect(service)
        host = found["HostConfig"]
        assert host["IpcMode"] in {"private", "shareable"}, service
        assert (host["PidMode"], host["UTSMode"], host["Privileged"]) == ("", "", False), service
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["CapAdd"] or []) == (True, ["ALL"], []), service
        assert host["RestartPolicy"]["Name"] in {"", "no"}, service
        writable = [(mount["Type"], mount["Destination"]) for mount in found["Mounts"] if mount["RW"]]
        assert writable == [("volume", "/run/rollplex")], service
        assert node.inside(service, "stat", "-c", "%u %a", "/run/rollplex").split() == ["10001", "700"], service
        assert node.inside(service, "cat", "/proc/1/comm").strip() == "python", service  # gets the signals itself
    assert {node.inspect(worker)["HostConfig"]["NetworkMode"] for worker in WORKERS} == {"none"}


def check_one_copy(node: Node, before: dict[str, object], after: dict[str, object]) -> None:
    """All workers see the same new weights, because they map the same pages: descriptors crossed the containers."""
    assert before["agree"] is True
    assert after["agree"] is True
    digests = after["digests"]
    assert isinstance(digests, list)
    assert {(d["service"], d["version"]) for d in digests} == {(f"{worker}[0:0]", ITERATIONS) for worker in WORKERS}
    assert before["digests"] != digests
    mapped = {node.inside(worker, "grep", "-h", "memfd:rollplex-actor_weights", "/proc/1/maps") for worker in WORKERS}
    inodes = {(line.split()[3], line.split()[4]) for lines in mapped for line in lines.splitlines()}
    assert len(inodes) == 1, mapped


def test_a_killed_trainer_is_named_and_the_next_up_goes_on_from_the_checkpoint_until_compose_stops_it(
    node: Node,
) -> None:
    with node.api() as api:
        api.post("/iterations", json={"count": 1_000_000}).raise_for_status()
        node.until(lambda: bool(api.get("/checkpoints").json()), "a checkpoint", 180)
        with ThreadPoolExecutor(max_workers=1) as pool:
            errors = pool.submit(errors_in_the_stream, api)
            node.run("kill", "trainer")
            (error,) = errors.result(timeout=60)
    assert error["service"] == "trainer[0:0]"
    assert error["error"]["what"] == "the trainer service died"
    node.until(lambda: None not in node.exit_codes().values(), "end of all containers", 60)
    assert node.exit_codes() == {"coordinator": 1, "prefix": 0, "rollout": 0, "trainer": 128 + signal.SIGKILL}
    look = ("run", "--rm", "--no-deps", "--entrypoint", "rollplex", "coordinator", "status", "/run/rollplex")
    assert "the trainer service died" in node.run(*look, deadline_s=60)

    node.run("up", "--detach", "--no-build", deadline_s=120)
    with node.api() as api:
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "loaded node", 180)
        done = api.get("/status").json()["iterations_done"]
        assert done > 0
        assert done == max(checkpoint_steps(node))
        api.post("/iterations", json={"count": 1}).raise_for_status()
        node.until(lambda: api.get("/status").json()["iterations_done"] == done + 1, "one more iteration", 120)
    rows = node.inside("coordinator", "cat", "/run/rollplex/metrics.jsonl").splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(done + 1))
    node.run("stop", deadline_s=90)
    assert node.exit_codes() == dict.fromkeys(SERVICES, 0), node.run("logs")


def errors_in_the_stream(api: httpx.Client) -> list[dict[str, Any]]:
    """What the event stream tells of errors until the coordinator ends it."""
    found: list[dict[str, Any]] = []
    kind = ""
    with api.stream("GET", "/events", timeout=60) as stream, suppress(httpx.TransportError):
        for line in stream.iter_lines():
            if line.startswith("event:"):
                kind = line.removeprefix("event:").strip()
            elif line.startswith("data:") and kind == "ErrorRaised":
                found.append(json.loads(line.removeprefix("data:"))["event"])
    return found


def checkpoint_steps(node: Node) -> list[int]:
    names = node.inside("coordinator", "ls", "/run/rollplex/checkpoints").split()
    return [int(name.removeprefix("step_")) for name in names if name.startswith("step_")]


def test_a_stop_while_everything_still_starts_ends_every_container_with_code_0(node: Node) -> None:
    """The same containers, the same run directory: SIGTERM finds no coordinator, or a handshake."""
    for again in (False, True):
        if again:
            node.run("start", deadline_s=60)
        node.until(lambda: all(caught_terms(node, service) for service in SERVICES), "processes that run", 60)
        node.run("stop", deadline_s=90)
        assert node.exit_codes() == dict.fromkeys(SERVICES, 0), node.run("logs")


def caught_terms(node: Node, service: str) -> bool:
    """Whether process 1 of a container handles SIGTERM (bit 14 of SigCgt): before that nothing can reach it."""
    try:
        text = node.inside(service, "cat", "/proc/1/status")
    except AssertionError:  # the command was not let in
        state = node.inspect(service)["State"]
        assert state["Running"], f"{service} ended with {state['ExitCode']}:\n{node.run('logs')}"
        return False
    status = dict(line.split(":\t") for line in text.splitlines())
    return bool(int(status["SigCgt"], 16) >> 14 & 1)
