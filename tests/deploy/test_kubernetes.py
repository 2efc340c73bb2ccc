"""The Pod's manifest, read as a file: its form, and what compose.yaml promises too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollplex.config.job import DeadlinesSection
from rollplex_coordinator.options import ResumeOptions, parse_options
from rollplex_coordinator.processes.device import EXTERNAL_MPS

ROOT = Path(__file__).resolve().parents[2]
RUN_DIR = "/run/rollplex"
WORKERS = ("rollout", "prefix", "trainer")
PROBE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["exec", "periodSeconds", "timeoutSeconds"],
    "properties": {
        "exec": {
            "type": "object",
            "required": ["command"],
            "additionalProperties": False,
            "properties": {"command": {}},
        },
        "initialDelaySeconds": {"type": "integer"},
        "periodSeconds": {"type": "integer"},
        "timeoutSeconds": {"type": "integer"},
        "failureThreshold": {"type": "integer"},
    },
}
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
STRINGS = {"type": "array", "items": {"type": "string"}}
CONTAINER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "image", "securityContext", "volumeMounts"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9-]{1,63}$"},
        "image": {"type": "string"},
        "restartPolicy": {"const": "Always"},
        "command": STRINGS,
        "args": STRINGS,
        "securityContext": {"type": "object"},
        "env": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "value"],
                "additionalProperties": False,
                "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
            },
        },
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"requests": QUANTITIES, "limits": QUANTITIES},
        },
        "startupProbe": PROBE,
        "readinessProbe": PROBE,
        "livenessProbe": PROBE,
        "volumeMounts": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "mountPath"],
                "additionalProperties": False,
                "properties": {"name": {}, "mountPath": {}, "subPath": {}, "readOnly": {"type": "boolean"}},
            },
        },
    },
}
POD = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "v1"},
        "kind": {"const": "Pod"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["containers", "volumes"],
            "properties": {
                "restartPolicy": {"enum": ["Never", "OnFailure", "Always"]},
                "runtimeClassName": {"type": "string"},
                "shareProcessNamespace": {"type": "boolean"},
                "automountServiceAccountToken": {"type": "boolean"},
                "enableServiceLinks": {"type": "boolean"},
                "terminationGracePeriodSeconds": {"type": "integer"},
                "securityContext": {"type": "object"},
                "initContainers": {"type": "array", "items": CONTAINER},
                "containers": {"type": "array", "items": CONTAINER},
                "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
            },
        },
    },
}
"""The part of Kubernetes' Pod that the manifest uses: a misspelt field is none of it."""


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "pod.yaml").read_text(encoding="utf-8")))
    assert len(documents) == 1
    found: dict[str, Any] = documents[0]
    return found


@pytest.fixture(scope="module")
def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in pod["spec"]["containers"]}


def everything(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]


def test_it_is_a_pod_whose_mounts_are_its_volumes(pod: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(POD).validate(pod)
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    mounted = {mount["name"] for container in everything(pod) for mount in container["volumeMounts"]}
    assert mounted == volumes


def test_a_field_that_pods_do_not_have_is_seen(pod: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriod"):
        jsonschema.Draft202012Validator(POD).validate({**pod, "spec": {**pod["spec"], "terminationGracePeriod": 1}})


def test_nothing_of_the_host_is_shared_and_nobody_has_rights(pod: dict[str, Any]) -> None:
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod["spec"])
    assert all("hostPath" not in volume for volume in pod["spec"]["volumes"])
    context = pod["spec"]["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, 10001, 10001)
    for container in everything(pod):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_all_four_services_share_the_run_directory_and_a_stop_waits_longer_than_a_unit(
    pod: dict[str, Any], containers: dict[str, dict[str, Any]]
) -> None:
    assert set(containers) == {"coordinator", *WORKERS}
    for name, container in containers.items():
        assert container["image"] == f"rollplex-{name}:gpu"
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert mounts[RUN_DIR] == {"name": "run", "mountPath": RUN_DIR, "subPath": "run"}
        assert mounts["/project"]["readOnly"] is True
        assert container["resources"]["limits"]["memory"]
    for worker in WORKERS:
        words = containers[worker]["readinessProbe"]["exec"]["command"]
        assert words == ["python", "-m", "rollplex.health", f"--run-dir={RUN_DIR}", f"--role={worker}"]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= DeadlinesSection().unit_s
    assert pod["spec"]["restartPolicy"] == "Never"  # a run's end is a decision


def test_the_coordinator_takes_its_arguments_and_its_probe_asks_where_it_listens(
    containers: dict[str, dict[str, Any]],
) -> None:
    coordinator = containers["coordinator"]
    options = parse_options(["--run-dir", RUN_DIR, *coordinator["args"]])
    assert (options.external_workers, options.serve, options.resume) == (True, True, ResumeOptions(if_any=True))
    assert options.overrides == ("http.port=8765",)  # on the Pod's loopback address
    code = coordinator["startupProbe"]["exec"]["command"][2]
    compile(code, "probe", "exec")
    assert '"127.0.0.1", 8765' in code
    assert coordinator["startupProbe"]["failureThreshold"] * 10 >= DeadlinesSection().load_s


def test_the_daemon_has_the_gpu_and_is_ready_before_its_clients_start(
    pod: dict[str, Any], containers: dict[str, dict[str, Any]]
) -> None:
    _, mps = pod["spec"]["initContainers"]
    assert mps["restartPolicy"] == "Always"  # which makes it a sidecar
    assert mps["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "startupProbe" in mps
    assert pod["spec"]["shareProcessNamespace"] is True
    for name, container in containers.items():
        environment = {item["name"]: item["value"] for item in container["env"]}
        variable = EXTERNAL_MPS if name == "coordinator" else "CUDA_MPS_PIPE_DIRECTORY"
        assert environment[variable] == "/run/mps"
        assert ("CUDA_MPS_PIPE_DIRECTORY" in environment) == (name != "coordinator")
        assert ("PYTORCH_ALLOC_CONF" in environment) == (name in {"prefix", "trainer"})
        assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])  # noqa: S108 - the Pod's
