"""Workers that are forked from the warm process of the tests: like started ones, in all that a test could see."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.warm import COLD, warm_process, worker_environment

OPTIONS: list[str] = []
"""Of the interpreter."""
DEADLINE_S = 100.0  # the first worker waits until torch is imported


def command(*arguments: str) -> list[str]:
    return [sys.executable, *OPTIONS, "-m", "warm_probe", *arguments]


def environment(**variables: str) -> dict[str, str]:
    """As a worker of a node gets it."""
    return {**worker_environment(), **variables}


def run(*arguments: str, env: Mapping[str, str], **given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=dict(env), capture_output=True, text=True, timeout=DEADLINE_S, check=False, **given
    )


def is_warm(env: Mapping[str, str], **given: Any) -> bool:
    return run("warm", env=env, **given).stdout.endswith("True\n")


@contextmanager
def begun(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that prints its pid; a handle of the process that printed it."""
    with ExitStack() as stack:
        process = subprocess.Popen(command(*arguments), env=environment(), stdout=subprocess.PIPE, text=True)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid, "it was not forked"
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        yield process, pidfd


def ends(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])


def until_it_blocks(pid: int, number: signal.Signals) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        blocked = Path(f"/proc/{pid}/status").read_text().split("SigBlk:")[1].split()[0]
        if int(blocked, 16) >> (number - 1) & 1:
            return
        time.sleep(0.01)
    pytest.fail(f"{number.name} is never blocked")


def test_a_worker_of_a_node_is_forked_and_a_cold_one_is_not() -> None:
    assert is_warm(environment())
    assert not is_warm(environment(**COLD))


@pytest.mark.parametrize("options", [[], ["-P"]], ids=["", "safe path"])
def test_a_forked_worker_sees_what_a_started_one_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setitem(globals(), "OPTIONS", options)
    assert is_warm(environment())
    found = {}
    for name, more in (("forked", {"A": "ü\udcff"}), ("started", {"A": "ü\udcff", **COLD})):
        old = os.umask(0o027)
        try:
            done = run("see", env=environment(**more), cwd=tmp_path, input="said", start_new_session=True)
        finally:
            os.umask(old)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout)
    differing = {
        key: (found["forked"][key], value) for key, value in found["started"].items() if found["forked"][key] != value
    }
    seen = differing.pop("environment")
    assert {key for key in seen[0] if seen[0][key] != seen[1].get(key)} == set(COLD)
    assert differing == {}


@pytest.mark.parametrize(
    "how", [["exit", "0"], ["exit", "7"], ["raise"], ["signal", "9"], ["signal", "15"], ["signal", "6"]], ids=" ".join
)
def test_it_ends_as_the_started_one(how: list[str]) -> None:
    forked, started = run(*how, env=environment()), run(*how, env=environment(**COLD))
    assert forked.returncode == started.returncode
    assert forked.stdout == started.stdout
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_signal_reaches_it_and_its_answer_comes_back() -> None:
    with begun("obey") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == signal.SIGTERM + 1


def test_a_signal_that_comes_while_it_is_forked_reaches_it_too() -> None:
    with warm_process(modules=()) as pid:
        os.kill(pid, signal.SIGSTOP)
        process = subprocess.Popen(command("wait"), env=environment(), stdout=subprocess.DEVNULL)
        try:
            until_it_blocks(process.pid, signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
            os.kill(pid, signal.SIGCONT)
            assert process.wait(DEADLINE_S) == -signal.SIGTERM
        finally:
            process.kill()
            process.wait(DEADLINE_S)


@pytest.mark.parametrize("doing", ["wait", "stand still"])
def test_it_is_killed_with_the_process_that_stands_for_it(doing: str) -> None:
    with begun(doing) as (process, pidfd):
        process.kill()
        assert ends(pidfd)


def test_all_end_with_the_warm_process() -> None:
    with warm_process(modules=()) as pid, begun("wait") as (process, pidfd):
        os.kill(pid, signal.SIGKILL)
        assert ends(pidfd)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_what_a_fork_could_not_give_is_started() -> None:
    assert not is_warm(environment(OMP_NUM_THREADS="2"))
    assert not is_warm(environment(PYTHONPATH=f"{os.environ['PYTHONPATH']}:/elsewhere"))
    with Path(__file__).open("rb") as file:
        assert not is_warm(environment(), pass_fds=[file.fileno()])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert not is_warm(environment(), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, most)))
