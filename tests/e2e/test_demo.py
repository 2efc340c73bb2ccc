"""`rollplex demo --quick` as a newcomer runs it: it learns, and with nothing to see it does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollplex.demo.recipe import ACCURACY, EVAL_GREY, EVAL_HELD_OUT
from rollplex.verify.report import read
from support.nodes import run_processes
from support.warm import COLD

COMMAND = (
    sys.executable,
    "-c",
    "import sys; from rollplex.cli import main; sys.exit(main())",
    "demo",
    "--quick",
    "--dir",
)


@pytest.mark.timeout(400)
def test_four_digits_are_learnt_from_scratch_and_grey_pictures_stay_at_chance(tmp_path: Path) -> None:
    command, env = [*COMMAND, str(tmp_path / "demo")], {**os.environ, **COLD}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380, env=env)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "demo" / "run" / "eval.jsonl").read_text().splitlines()]
    accuracy = {(row["name"], row["step"]): row[ACCURACY] for row in rows}
    assert accuracy[EVAL_HELD_OUT, 0] < 0.5
    assert accuracy[EVAL_HELD_OUT, 400] >= 0.85
    assert accuracy[EVAL_GREY, 400] < 0.4
    assert [line[:4] for line in done.stdout.splitlines()[-3:]] == ["PASS", "PASS", "PASS"], done.stdout
    for part in ("stays at chance", "✓", "split against unsplit", "where the time of an iteration goes", "hidden"):
        assert part in done.stdout
    run_dir = tmp_path / "demo" / "run"
    assert str(run_dir) in done.stdout
    assert (tmp_path / "demo" / "answers.png").is_file()
    assert read(run_dir / "verify.json").passed
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "answers.png",
        "config.yaml",
        "data",
        "model",
        "run",
    ]


@pytest.mark.timeout(100)
def test_an_interrupt_of_the_demo_ends_everything_quietly(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo" / "run"
    with subprocess.Popen([*COMMAND, str(tmp_path / "demo")], stderr=subprocess.PIPE, stdout=subprocess.PIPE) as demo:
        end = time.monotonic() + 60
        while not (run_dir / "metrics.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.1)
        demo.send_signal(signal.SIGINT)
        stdout, stderr = demo.communicate(timeout=20)
    assert demo.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert b"it ended early" in stdout
    assert str(run_dir).encode() in stdout
    assert not run_processes(run_dir)
