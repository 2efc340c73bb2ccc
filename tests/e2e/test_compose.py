"""compose.yaml with a real engine: four containers, descriptors through a shared volume, HTTP, nothing left behind."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

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

# Wheels and images are made once; on two busy cores that takes minutes.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
BUILD_S = 540.0
ITERATIONS = 2


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
    config |= {"eval": [], "data": {"path": "data/train.jsonl", "prompts_per_iteration": 4}}
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


def test_two_iterations_through_four_containers_started_and_stopped_by_http(node: Node) -> None:
    with node.api() as api:
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "loaded node", 180)
        assert {s["service"] for s in api.get("/services").json()} >= {f"{worker}[0:0]" for worker in WORKERS}
        check_isolation(node)
        before = api.post("/services/digests", json={}).json()
        api.post("/iterations", json={"count": ITERATIONS}).raise_for_status()
        node.until(lambda: committed(api.get("/iterations").json()) == [0, 1], "two committed iterations", 120)
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "idleness", 60)
        after = api.post("/services/digests", json={}).json()
        check_one_copy(node, before, after)
        node.until(lambda: node.inspect("coordinator")["State"]["Health"]["Status"] == "healthy", "health", 60)
        api.post("/stop", json={"when": "after_iteration", "exit": True}).raise_for_status()
    node.until(lambda: None not in node.exit_codes().values(), "end of all containers", 60)
    assert node.exit_codes() == dict.fromkeys(SERVICES, 0), node.run("logs")
    assert all(node.left().values())
    node.run("down", "--volumes", deadline_s=90)
    assert node.left() == {"containers": [], "volumes": [], "networks": []}


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


def test_a_stop_by_compose_ends_every_container_with_code_0(node: Node) -> None:
    with node.api() as api:
        api.post("/iterations", json={"count": 1_000_000}).raise_for_status()
        node.until(lambda: committed(api.get("/iterations").json())[:1] == [0], "an iteration", 180)
    node.run("stop", deadline_s=90)
    assert node.exit_codes() == dict.fromkeys(SERVICES, 0), node.run("logs")
    # The same containers, the same run directory, while everything still starts: SIGTERM finds no coordinator, or a
    # handshake.
    for _ in range(2):
        node.run("start", deadline_s=60)
        node.until(lambda: all(caught_terms(node, service) for service in SERVICES), "processes that run", 60)
        node.run("stop", deadline_s=90)
        assert node.exit_codes() == dict.fromkeys(SERVICES, 0), node.run("logs")


def caught_terms(node: Node, service: str) -> bool:
    """Whether process 1 of a container handles SIGTERM (bit 14 of SigCgt): before that nothing can reach it."""
    status = dict(line.split(":\t") for line in node.inside(service, "cat", "/proc/1/status").splitlines())
    return bool(int(status["SigCgt"], 16) >> 14 & 1)
