"""The process in which the user's reward functions run, and nothing else.

    python -P -m rollplex.rewards.runner SOCKET_FD STACK_FD

It has no secret, no socket of the run, no GPU, no input; it ends with the reward child that started it. The functions
run in its main thread (some use signals for time limits of their own). On SIGUSR1 it writes where it is to STACK_FD,
even while a function holds the interpreter. Imports no numpy, so that little is there before the memory limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import inspect
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec

from rollplex.errors import RewardError
from rollplex.protocol.reward import RewardProblem
from rollplex.rewards.loading import load_function, short_trace
from rollplex.rewards.signature import Signature, batch
from rollplex.rewards.validate import Finding, check
from rollplex.rewards.wire import (
    LENGTH_BYTES,
    TO_RUNNER,
    Broke,
    Entered,
    FromRunner,
    Prepare,
    Ready,
    Returned,
    Score,
    Unusable,
    frame,
)

PR_SET_PDEATHSIG = 1


class Runner:
    """The functions, and answering for them."""

    def __init__(self, send: Callable[[FromRunner], None]) -> None:
        self._send = send
        self._functions: list[tuple[Callable[..., object], Signature]] = []

    def prepare(self, message: Prepare) -> None:
        """Set the limits, import the functions."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if message.memory_limit_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (message.memory_limit_bytes, message.memory_limit_bytes))
        for spec in message.specs:
            try:
                function = load_function(spec)
                self._functions.append((function, Signature(function)))
            except RewardError as error:
                parts = {"what": error.what, "got": error.got, "needed": error.needed, "do": error.do}
                self._send(Unusable(**parts, where=error.where or spec))
                return
        self._send(Ready())

    def score(self, message: Score) -> None:
        """Call the functions in their order, each with lists of its own; stop at the first that fails."""
        samples = _samples(message)
        for index, (function, signature) in enumerate(self._functions):
            self._send(Entered(function=index))
            outcome = _call(function, signature, message, samples)
            if isinstance(outcome, Finding):
                self._send(Broke(function=index, problem=outcome.problem, detail=outcome.detail))
                return
            self._send(Returned(function=index, values=outcome))


def _call(
    function: Callable[..., object], signature: Signature, message: Score, samples: list[list[int]]
) -> list[float | None] | Finding:
    pid = os.getpid()
    try:
        row = msgspec.json.decode(message.row, type=dict[str, object])
        returned = function(**signature.pick(batch(row, message.texts, samples)))
        if inspect.iscoroutine(returned):
            import asyncio  # noqa: PLC0415 - a tenth of a second that most functions do not need

            returned = asyncio.run(returned)
        outcome = check(returned, len(message.texts))
    except RewardError as error:
        outcome = Finding(problem=RewardProblem.RAISED, detail=_said(error))
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
        outcome = Finding(problem=RewardProblem.RAISED, detail=short_trace(error))
    if os.getpid() != pid:
        os._exit(0)  # the function forked and its copy came back: only the original may answer
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the function closed it
            stream.flush()
    return outcome


def _said(error: RewardError) -> str:
    """What goes behind the "got" of another error, so without one of its own."""
    needed = f" (it may ask for {error.needed})" if error.needed else ""
    return ": ".join(part for part in (error.what, error.got) if part) + needed


def _samples(message: Score) -> list[list[int]]:
    numbers = memoryview(message.tokens).cast("i").tolist()
    samples: list[list[int]] = []
    at = 0
    for length in message.lengths:
        samples.append(numbers[at : at + length])
        at += length
    return samples


def _receive(channel: socket.socket, size: int) -> bytes:
    """Exactly so many bytes; ends the process when the reward child is gone."""
    content = bytearray()
    while len(content) < size:
        got = channel.recv(min(size - len(content), 2**20))
        if not got:
            sys.exit(0)
        content += got
    return bytes(content)


def main(socket_fd: int, stack_fd: int) -> None:
    """Serve until the other end is closed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=False)
    sys.path.append(str(Path.cwd()))  # last: a file there must not hide a module of ours or of Python's
    with socket.socket(fileno=socket_fd) as channel:
        runner = Runner(lambda message: channel.sendall(frame(message)))
        while True:
            size = int.from_bytes(_receive(channel, LENGTH_BYTES), "little")
            message = TO_RUNNER.decode(_receive(channel, size))
            match message:
                case Prepare():
                    runner.prepare(message)
                case Score():
                    runner.score(message)
                case _:
                    assert_never(message)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
