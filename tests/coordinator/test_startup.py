"""What a run says of its beginning."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rollplex.config import dump, from_mapping
from rollplex_coordinator.startup import process_start_s, run_started
from support.core import make_config

TELL = "from rollplex_coordinator.startup import process_start_s as s; print(s())"
BECOME = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {TELL!r}])"
TICK_S = 0.02
"""The kernel keeps the start of a process in hundredths."""


def test_a_process_started_after_its_parent_started_it_and_exec_does_not_change_that() -> None:
    before_s = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", BECOME], stdout=subprocess.PIPE, text=True) as process:
        after_s = time.monotonic()
        out, _ = process.communicate(timeout=60)
    assert before_s - TICK_S <= float(out) <= after_s + TICK_S
    assert process_start_s() < before_s


def test_the_first_event_says_what_is_run(tmp_path: Path) -> None:
    config = make_config(tmp_path, run={"seed": 5, "schedule": "stream"})
    event = run_started("digits-1", config, 7)
    assert (event.run, event.seed, event.schedule, event.iterations_wanted) == ("digits-1", 5, "stream", 7)
    other = from_mapping({**config.model_dump(mode="json"), "run": {"seed": 6}})
    assert dump(other) != dump(config)
    assert run_started("digits-1", other, 7).config_digest != event.config_digest
    assert event == run_started("digits-1", config, 7)
