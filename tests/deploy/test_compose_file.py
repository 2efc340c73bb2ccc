"""compose.yaml and the Dockerfiles as files: what they promise can be read in them, without an engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollplex.config.job import DeadlinesSection
from rollplex.config.loading import load
from rollplex.demo.__main__ import main as write_demo
from rollplex.protocol.common import Role
from rollplex_coordinator.options import ResumeOptions, parse_options
from rollplex_coordinator.processes.device import EXTERNAL_MPS
from rollplex_coordinator.processes.environment import GpuAccess, environment_of
from support.compose import find_compose

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("coordinator", "rollout", "prefix", "trainer")
WORKERS = SERVICES[1:]
RUN_DIR, PROJECT = "/run/rollplex", "/project"
FORBIDDEN = {"privileged", "ipc", "pid", "uts", "userns_mode", "cap_add", "devices", "group_add", "cgroup_parent"}
GPU_RESERVATION = {
    "resources": {"reservations": {"devices": [{"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}]}}
}
VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")


def with_defaults(value: Any) -> Any:
    """Variables replaced by their defaults, as Compose does in an empty environment."""
    if isinstance(value, dict):
        return {key: with_defaults(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    return VARIABLE.sub(lambda match: match[2], value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "compose.yaml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def everything(text: str) -> dict[str, dict[str, Any]]:
    """All services, those of profiles too."""
    document: dict[str, Any] = with_defaults(yaml.safe_load(text))
    assert set(document["volumes"]) == {"run", "mps"}
    found: dict[str, dict[str, Any]] = document["services"]
    return found


@pytest.fixture(scope="module")
def services(everything: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that run without a profile."""
    return {name: service for name, service in everything.items() if "profiles" not in service}


def dockerfile(service: str) -> list[str]:
    return (ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8").splitlines()


def entrypoint(service: str) -> list[str]:
    """The exec form, from the Dockerfile."""
    (line,) = [line for line in dockerfile(service) if line.startswith("ENTRYPOINT ")]
    words: list[str] = json.loads(line.removeprefix("ENTRYPOINT "))
    return words


def test_four_services_each_with_an_image_of_its_own(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == set(SERVICES)
    for name, service in services.items():
        assert service["build"]["context"] == "."
        assert service["build"]["dockerfile"] == f"services/{name}/Dockerfile"
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        assert service["image"] == f"rollplex-{name}:latest"
    assert len({json.dumps(service["build"]["args"]) for service in services.values()}) == 1


def test_no_service_has_rights_or_shares_a_namespace(
    services: dict[str, dict[str, Any]], everything: dict[str, dict[str, Any]]
) -> None:
    for service in services.values():
        assert not FORBIDDEN & set(service)
    for service in everything.values():
        assert not (FORBIDDEN - {"ipc"}) & set(service)
        assert service.get("ipc", "shareable") == "shareable"  # of the MPS daemon, to its clients: never the host's
        assert not any("docker.sock" in str(volume) for volume in service["volumes"])
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["restart"] == "no"  # who dies is not started again behind the coordinator's back
        assert service["user"] == "10001:10001"
    assert {services[worker]["network_mode"] for worker in WORKERS} == {"none"}
    assert "network_mode" not in services["coordinator"]


def test_all_run_as_one_user_that_is_not_root_and_owns_the_run_directory(services: dict[str, dict[str, Any]]) -> None:
    assert {service["user"] for service in services.values()} == {"10001:10001"}
    for name, service in services.items():
        args = service["build"]["args"]
        assert service["user"] == f"{args['UID']}:{args['GID']}"
        lines = "\n".join(dockerfile(name))
        assert f'install -d -m 0700 -o "${{UID}}" -g "${{GID}}" {RUN_DIR}' in lines
        assert "USER ${UID}:${GID}" in lines
        assert "ARG UID=10001\nARG GID=10001" in lines


def test_all_see_the_run_directory_and_the_users_folder_at_the_same_paths(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["volumes"] == [
            {"type": "volume", "source": "run", "target": RUN_DIR},
            {"type": "bind", "source": "./runs/digits", "target": PROJECT, "read_only": True},
        ]
        assert entrypoint(name)[-2:] == ["--run-dir", RUN_DIR]


def test_only_the_control_api_is_published_and_on_loopback_only(services: dict[str, dict[str, Any]]) -> None:
    assert services["coordinator"]["ports"] == ["127.0.0.1:8765:8765"]
    for worker in WORKERS:
        assert not {"ports", "expose", "networks"} & set(services[worker])


def test_each_service_has_a_health_check_and_a_stop_waits_longer_than_a_unit_may_take(
    services: dict[str, dict[str, Any]], everything: dict[str, dict[str, Any]]
) -> None:
    for service in everything.values():
        check = service["healthcheck"]
        assert check["retries"] == 3
        assert seconds(check["timeout"]) < seconds(check["interval"])
    for worker in WORKERS:  # what the coordinator has heard of it: a worker has no network to be asked by
        words = services[worker]["healthcheck"]["test"]
        assert words == ["CMD", "python", "-m", "rollplex.health", f"--run-dir={RUN_DIR}", f"--role={worker}"]
    for service in services.values():
        assert seconds(service["stop_grace_period"]) >= DeadlinesSection().unit_s


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def test_profiles_add_services_and_nothing_else(everything: dict[str, dict[str, Any]]) -> None:
    profiles = {name: service["profiles"] for name, service in everything.items() if "profiles" in service}
    assert profiles == {"mps": ["gpu"], "prometheus": ["monitoring"], "grafana": ["monitoring"]}
    mps = everything["mps"]
    assert mps["deploy"] == GPU_RESERVATION
    assert mps["network_mode"] == "none"
    assert mps["volumes"] == [{"type": "volume", "source": "mps", "target": "/run/mps"}]
    assert mps["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"


def test_on_a_gpu_the_workers_are_clients_of_the_daemon_with_the_environment_of_our_own_children(
    everything: dict[str, dict[str, Any]],
) -> None:
    document = with_defaults(yaml.safe_load((ROOT / "deploy" / "compose.gpu.yaml").read_text(encoding="utf-8")))
    assert set(document["services"]) == set(SERVICES)
    access = GpuAccess(uuid="GPU-1", mps={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}, deterministic=True)
    for name, service in document["services"].items():
        assert (service["ipc"], service["pid"]) == ("service:mps", "service:mps")
        assert service["deploy"] == GPU_RESERVATION
        assert service["depends_on"] == {"mps": {"condition": "service_healthy"}}
        mounted = {volume["target"]: volume.get("read_only", False) for volume in service["volumes"]}
        assert mounted == {"/run/mps": name == "coordinator"}
        if name == "coordinator":  # it computes nothing, and is told of the daemon by a name that the driver ignores
            assert service["environment"][EXTERNAL_MPS] == "/run/mps"
            assert "CUDA_MPS_PIPE_DIRECTORY" not in service["environment"]
            continue
        ours = environment_of(Role(name), {}, 1, access)
        names = {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF"}
        wanted = {key: value for key, value in ours.items() if key in names}
        assert {key: value for key, value in service["environment"].items() if key in names} == wanted


def test_the_environment_file_of_a_gpu_names_what_is_there(text: str) -> None:
    lines = (ROOT / "deploy" / "gpu.env").read_text(encoding="utf-8").splitlines()
    values = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert all((ROOT / name).is_file() for name in values["COMPOSE_FILE"].split(":"))
    assert values["COMPOSE_PROFILES"] == "gpu"
    assert (ROOT / "constraints" / values["ROLLPLEX_CONSTRAINTS"]).is_file()
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(values["ROLLPLEX_EXTRAS"].split()) <= set(optional)
    assert {name for name in values if name.startswith("ROLLPLEX_")} <= {name for name, _ in VARIABLE.findall(text)}


def test_monitoring_reads_the_token_from_its_file_and_only_grafana_is_published(
    everything: dict[str, dict[str, Any]],
) -> None:
    prometheus, grafana = everything["prometheus"], everything["grafana"]
    assert "ports" not in prometheus  # it asks for no password
    assert grafana["ports"] == ["127.0.0.1:3000:3000"]
    run = {"type": "volume", "source": "run", "target": RUN_DIR, "read_only": True}
    for service in (prometheus, grafana):
        assert run in service["volumes"]
        for volume in service["volumes"]:
            assert volume["read_only"] is True
            assert volume["type"] == "volume" or (ROOT / volume["source"]).exists()
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = scrape["scrape_configs"]
    assert job["authorization"]["credentials_file"] == f"{RUN_DIR}/token"
    assert job["static_configs"] == [{"targets": ["coordinator:8765"]}]
    assert everything["coordinator"]["hostname"] == "coordinator"  # so that the API takes this name for its own
    environment = grafana["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == f"{RUN_DIR}/token"
    assert grafana["depends_on"]["coordinator"] == {"condition": "service_healthy"}  # which has written the token
    assert all(environment[name] == "false" for name in environment if name.startswith("GF_ANALYTICS_"))


def test_python_is_process_1_and_gets_the_signals(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert entrypoint(name)[:3] == ["/opt/rollplex/bin/python", "-m", f"rollplex_{name}"]
        assert "init" not in service
        assert "entrypoint" not in service
        assert "stop_signal" not in service


def test_the_coordinator_takes_its_command_and_listens_where_port_and_health_check_look(
    services: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    assert write_demo([str(tmp_path), "--quick"]) == 0
    command = [word.replace(PROJECT, str(tmp_path)) for word in services["coordinator"]["command"]]
    options = parse_options([*entrypoint("coordinator")[3:], *command])
    assert (options.external_workers, options.serve, options.iterations) == (True, True, 0)
    assert options.resume == ResumeOptions(if_any=True)
    http = load(options.config, options.overrides).http
    assert (http.host, http.port, http.allow_remote) == ("0.0.0.0", 8765, True)  # noqa: S104 - inside the container
    check = services["coordinator"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python", "-c"]
    assert f'"127.0.0.1", {http.port}' in check[3]
    compile(check[3], "healthcheck", "exec")


def test_every_variable_has_a_default_and_is_explained(text: str) -> None:
    used = set(re.findall(r"\$\{?([A-Z_]+)", text.split("x-confined:")[1]))
    assert used == {name for name, _ in VARIABLE.findall(text)}
    head = text.split("x-confined:", maxsplit=1)[0]
    for name in used - {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}:
        assert name in head or (name == "ROLLPLEX_GID" and "_GID" in head), name


def test_the_images_with_torch_begin_with_the_same_lines() -> None:
    beginnings = {worker: dockerfile(worker)[1 : dockerfile(worker).index("# ---")] for worker in WORKERS}
    without_package = {
        worker: [line.replace(f"services/{worker}", "services/NAME") for line in lines]
        for worker, lines in beginnings.items()
    }
    assert without_package["rollout"] == without_package["prefix"] == without_package["trainer"]
    for lines in beginnings.values():  # a service's own name only in the stage that is not kept
        assert sum(line.startswith("COPY services/") for line in lines) == 1
        kept = lines[: lines.index("FROM libraries AS package")] + lines[lines.index("FROM base") :]
        assert not any("services" in line for line in kept)


def test_the_coordinators_image_has_every_dependency_but_torch_and_transformers() -> None:
    (line,) = [line for line in dockerfile("coordinator") if "deploy/libraries.py" in line and "RUN" in line]
    words = shlex.split(line.removeprefix("RUN python3").split(">")[0])
    assert words == ["deploy/libraries.py", "--without", "torch", "--without", "transformers", "--extras", "${EXTRAS}"]
    words = words[:-2]
    script = [sys.executable, str(ROOT / "deploy" / "libraries.py")]
    everything, without = (
        subprocess.run([*script, *more], check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()
        for more in ([], words[1:])
    )
    left_out = {re.split(r"[<>=]", line)[0] for line in set(everything) - set(without)}
    assert left_out == {"torch", "transformers"}
    assert set(without) < set(everything)
    more = subprocess.run([*script, "--extras", "cuda sglang"], check=True, capture_output=True, text=True, timeout=30)
    added = {re.split(r"[<>=]", line)[0] for line in set(more.stdout.splitlines()) - set(everything)}
    assert added == {"cuda-python", "nvidia-ml-py", "sglang"}
    for option in ("--without", "--extras"):
        wrong = subprocess.run([*script, option, "toch"], check=False, capture_output=True, text=True, timeout=30)
        assert (wrong.returncode, "toch" in wrong.stderr) == (2, True)


def test_the_build_context_is_what_the_dockerfiles_copy() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {Path(rule[1:]).parts[0] for rule in rules if rule.startswith("!")}
    lines = [line for service in SERVICES for line in dockerfile(service) if line.startswith("COPY ")]
    copied = {Path(source).parts[0] for line in lines if "--from" not in line for source in line.split()[1:-1]}
    assert (
        allowed == copied == {"LICENSE", "README.md", "pyproject.toml", "constraints", "deploy", "services", "shared"}
    )


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "deploy/compose.gpu.yaml")])
def test_compose_itself_accepts_the_files(files: tuple[str, ...]) -> None:
    """By the schema that the installed Compose brings, or by Compose's own check (which needs no engine)."""
    command = find_compose()
    if command is None:
        pytest.skip("neither docker compose nor docker-compose is there")
    named = [word for name in files for word in ("--file", str(ROOT / name))]
    profiles = {"COMPOSE_PROFILES": "gpu,monitoring"}
    done = subprocess.run(
        [*command, *named, "config", "--quiet"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **profiles},
    )
    assert done.returncode == 0, done.stderr
    schema = schema_of(command)
    if schema is not None:
        for name in files:
            document = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
            jsonschema.Draft7Validator(schema).validate(document)


def schema_of(command: tuple[str, ...]) -> dict[str, Any] | None:
    """The Compose specification's schema: a file that ROLLPLEX_COMPOSE_SCHEMA names, or that of the Python package
    behind docker-compose 1; None for a later Compose, whose own check is by it."""
    path = Path(os.environ.get("ROLLPLEX_COMPOSE_SCHEMA", ""))
    script = shutil.which(command[0])
    if not path.is_file() and len(command) == 1 and script is not None:
        first = Path(script).read_bytes()[:200].splitlines()[0]
        if first.startswith(b"#!"):
            code = "import compose.config as c, pathlib; print(pathlib.Path(c.__file__).with_name('compose_spec.json'))"
            python = first.removeprefix(b"#!").decode().split()
            done = subprocess.run([*python, "-c", code], check=False, capture_output=True, text=True, timeout=60)
            path = Path(done.stdout.strip())
    if not path.is_file():
        return None
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {**schema, "$schema": "http://json-schema.org/draft-07/schema#"}
