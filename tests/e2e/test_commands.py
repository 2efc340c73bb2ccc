"""The commands on a live node, and a dry run by the real coordinator."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from rollplex.cli.app import run
from rollplex.cli.status import report
from support.nodes import Project, Start, run_processes


@pytest.mark.timeout(150)
def test_a_node_is_started_looked_at_and_ended_from_the_command_line(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    node = start("--serve")
    which = ["--run", str(node.run_dir)]
    with node.api() as api:
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "the loaded node")
    assert run(["start", "2", *which]) == 0
    assert "2 more; 0 iterations done of 2 wanted" in capsys.readouterr().out
    node.until_iterations(2)
    assert run(["stop", "--stay", *which]) == 0
    capsys.readouterr()

    assert run(["status", str(node.run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["summary"]["state"], found["live"]["status"]["iterations_done"]) == ("running", 2)
    assert {service["state"] for service in found["live"]["services"]} == {"ready"}
    assert run(["status", str(node.run_dir)]) == 0
    assert "trainer[0:0] ready" in capsys.readouterr().out

    assert run(["logs", *which]) == 0
    services = {line.split(" | ")[0].strip() for line in capsys.readouterr().out.splitlines()}
    assert services == {"rollout", "prefix", "trainer", "input", "reward"}

    assert run(["stop", *which]) == 0
    assert f"done after 2 iterations; newest checkpoint: {node.run_dir}/checkpoints/step_2" in capsys.readouterr().out
    assert node.wait(20).code == 0
    assert report(node.run_dir, node.run_dir.parent).live is None
    assert run(["down", *which]) == 0
    assert "nothing is running" in capsys.readouterr().out


@pytest.mark.timeout(100)
def test_a_dry_run_checks_data_rewards_and_memory_and_leaves_nothing(
    project: Project,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    temporary = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = sorted(project.folder.rglob("*"))
    assert run(["up", str(project.config), "--dry-run", "--iterations", "7"]) == 0
    out, err = capfd.readouterr()
    assert "digits-quick: 7 iterations" in out
    assert "imported" in out
    assert "nothing waits" in out
    assert err.splitlines()[-1] == "rollplex: it can run"

    assert run(["up", str(project.config), "--dry-run", "--set", "memory.budget=1281MiB"]) == 2
    assert "does not fit into the memory budget" in capfd.readouterr().err
    assert list(temporary.iterdir()) == []
    assert sorted(project.folder.rglob("*")) == before
    assert run_processes(Path(temporary)) == []
