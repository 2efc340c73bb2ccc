"""The warm process of a test run: workers of nodes are forked from it instead of importing torch anew.

Owns its start and end. Every process of the run finds `warm_site/sitecustomize.py` on its path and the socket in its
environment; see there how a start is handed over. Tests of what only a real start shows add COLD.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollplex.protocol.common import Role
from rollplex_coordinator.processes.environment import environment_of

VARIABLE = "ROLLPLEX_TEST_ZYGOTE"
COLD = {VARIABLE: ""}
"""Added to a process's environment: the workers below it start as a user's do."""
SITE = Path(__file__).with_name("warm_site")
END_S = 10.0
PRELOADED = (
    "torch",
    "transformers",
    "rollplex_trainer.service",
    "rollplex_prefix.service",
    "rollplex_rollout.service",
    "rollplex_rollout.transformers_engine",
)


def worker_environment() -> dict[str, str]:
    """As a node on a host gives it to its workers: one that is started with it is forked."""
    return environment_of(Role.TRAINER, os.environ, 1, None)


@contextmanager
def warm_process(modules: Sequence[str] = PRELOADED) -> Iterator[int]:
    """A warm process, and its socket in this process's environment; its pid. Its workers end with it.

    Args:
        modules: imported before the first worker is forked.
    """
    before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        address = str(Path(folder, "s"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), before["PYTHONPATH"])))
        os.environ[VARIABLE] = address
        command = [sys.executable, str(Path(__file__).with_name("warm_zygote.py")), address, *modules]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=worker_environment())
        try:
            assert process.stdout is not None
            with process.stdout as said:
                assert said.readline() == b"ready\n", "the warm process of the tests did not start"
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)  # it owns nothing that outlives it
            process.wait(END_S)
            restore(before)


def restore(variables: dict[str, str | None]) -> None:
    """Set the environment's variables to these; None: not there."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
