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
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec

from rollplex.errors import RewardError, RollplexError
from rollplex.protocol.reward import RequiredColumns, RewardProblem
from rollplex.rewards.awaiting import settled
from rollplex.rewards.call import Call
from rollplex.rewards.loading import load_function, short_trace, source_fingerprint
from rollplex.rewards.signature import OWNERS, Adapted, adapt
from rollplex.rewards.validate import Finding, bounded, check, take_parts
from rollplex.rewards.wire import (
    LENGTH_BYTES,
    TO_RUNNER,
    Broke,
    Entered,
    FromRunner,
    Images,
    Prepare,
    Ready,
    Returned,
    Score,
    Unusable,
    frame,
)

PR_SET_PDEATHSIG = 1
MAX_IMAGE_BYTES = 2**30
"""Of all images of a row together, decoded, 3 bytes a pixel."""


class Runner:
    """The functions, and answering for them."""

    def __init__(self, send: Callable[[FromRunner], None]) -> None:
        self._send = send
        self._functions: list[Adapted] = []

    def prepare(self, message: Prepare) -> None:
        """Set the limits, import the functions."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if message.memory_limit_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (message.memory_limit_bytes, message.memory_limit_bytes))
        with contextlib.suppress(OSError):  # where memory runs out all the same, this process goes first
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        taken, fingerprints = [], []
        for item in message.functions:
            try:
                function = load_function(item.spec)
                adapted = adapt(function, item.form, item.options)
            except RewardError as error:
                parts = {"what": error.what, "got": error.got, "needed": error.needed, "do": error.do}
                self._send(Unusable(**parts, where=error.where or item.spec))
                return
            self._functions.append(adapted)
            fingerprints.append(source_fingerprint(item.spec, function))
            place, _, name = item.spec.rpartition(":")
            taken.append(f"{name} of {Path(place).name} is taken as {OWNERS[adapted.form]}, {adapted.why}")
        self._send(
            Ready(
                taken=tuple(taken),
                images=any(adapted.images for adapted in self._functions),
                fingerprints=tuple(fingerprints),
                required=tuple(
                    RequiredColumns(names=adapted.columns, answer=adapted.answer) for adapted in self._functions
                ),
            )
        )

    def score(self, message: Score) -> None:
        """Call the functions in their order, each with lists of its own; stop at the first that fails."""
        for index, function in enumerate(self._functions):
            self._send(Entered(function=index))
            outcome = _call(function, message)
            if isinstance(outcome, Finding):
                self._send(Broke(function=index, problem=outcome.problem, detail=outcome.detail))
                return
            values, parts = outcome
            self._send(Returned(function=index, values=values, parts=parts))


def _call(function: Adapted, message: Score) -> tuple[list[float | None], dict[str, list[float]]] | Finding:
    pid = os.getpid()
    call = Call(
        row=msgspec.json.decode(message.row, type=dict[str, object]),
        texts=message.texts,
        ids=_samples(message),
        stopped=message.stopped,
        step=message.step,
        source=message.source,
        load_images=lambda: _load(message.images),
    )
    parts: dict[str, list[float]] = {}
    try:
        returned = settled(function.call(call), call)
        if function.key:
            returned, parts = take_parts(returned, function.key)
        outcome = check(returned, len(call))
        if isinstance(outcome, Finding) and function.key and outcome.problem is RewardProblem.WRONG_TYPE:
            detail = f"{outcome.detail} (needed: a number, or a dict with it as {function.key!r})"
            outcome = Finding(problem=outcome.problem, detail=detail)
    except RollplexError as error:
        outcome = Finding(problem=RewardProblem.RAISED, detail=_said(error))
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
        sample = "" if call.sample is None else f"sample {call.sample}: "
        outcome = Finding(problem=RewardProblem.RAISED, detail=sample + short_trace(error))
    if os.getpid() != pid:
        os._exit(0)  # the function forked and its copy came back: only the original may answer
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the function closed it
            stream.flush()
    return outcome if isinstance(outcome, Finding) else (outcome, bounded({**parts, **call.logged}))


def _said(error: RollplexError) -> str:
    """What goes behind the "got" of another error, so without one of its own."""
    needed = f" (needed: {error.needed})" if error.needed else ""
    return ": ".join(part for part in (error.what, error.got) if part) + needed


def _load(images: Images | None) -> list[object]:
    """Decode a row's images, as many as fit in `MAX_IMAGE_BYTES`; beyond, DataError."""
    if images is None:
        return []
    from rollplex.data.images import ImageFolder  # noqa: PLC0415 - imports numpy, which most functions do not need
    from rollplex.data.media import Embedded  # noqa: PLC0415
    from rollplex.errors import DataError  # noqa: PLC0415

    folder = ImageFolder(Path(images.folder), images.max_pixels)
    places = [place if isinstance(place, str) else Embedded(place.data, place.name) for place in images.places]
    headers = [folder.header(place) for place in places]
    size = 3 * sum(header.width * header.height for header in headers)
    if size > MAX_IMAGE_BYTES:
        raise DataError("The images of this row are too large to be decoded at once", got=f"{size} bytes")
    return [folder.load(place) for place in places]


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
