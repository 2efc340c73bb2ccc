"""The reward child's hold on the process of the user's functions.

Owns its start, its time limit, its death and what it prints. Whatever a function does (hang with or without the
interpreter, crash, exit, eat memory, print, close its files), `score` returns within the limit and says which function
it was. Does not know datasets, tokenizers or other processes of its kind.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

import msgspec

from rollplex.errors import RewardError
from rollplex.programs import own
from rollplex.protocol.reward import RewardProblem
from rollplex.rewards.wire import (
    FROM_RUNNER,
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Broke,
    Entered,
    FromRunner,
    Function,
    Prepare,
    Ready,
    Returned,
    Score,
    Unusable,
    frame,
)

IMPORT_LIMIT_S = 120.0
SEND_LIMIT_S = 10.0
STACK_WAIT_S = 1.5
_CHUNK_BYTES = 2**16
_NO_MEMORY = ("MemoryError", "Cannot allocate memory", "cannot allocate memory", "failed to map segment")
"""How an import says that it got no memory: Python, the operating system, the dynamic linker."""
_DO_RAISE = "Raise rewards.memory_limit, or take it out."


class Cancelled(Exception):  # noqa: N818 - what happened, not an error
    """Whoever holds this process wants no answer any more."""


class _GoneError(Exception):
    """The process ended, or closed its channel."""


class FunctionProcess:
    """The process that imports and calls the functions; started on first use, and again after it was lost.

    It lives as long as the thread that starts it, which must be the one that uses it.

    Args:
        functions: in their order.
        memory_limit_bytes: RLIMIT_AS of the process; 0 is off.
        log: where what it prints goes.
        output_limit_bytes: of what it prints over the whole run, so much reaches the log.
        cancel_fd: once it is readable, whoever waits here gets `Cancelled`.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        memory_limit_bytes: int,
        log: Callable[[bytes], object],
        *,
        output_limit_bytes: int = 16 * 2**20,
        cancel_fd: int | None = None,
    ) -> None:
        self._prepare = Prepare(functions=tuple(functions), memory_limit_bytes=memory_limit_bytes)
        self._log = log
        self._output_limit = self._output_left = output_limit_bytes
        self._cancel_fd = cancel_fd
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, limit_s: float = IMPORT_LIMIT_S) -> Ready:
        """Start the process and import the functions.

        Raises:
            RewardError: a function that cannot be imported, or an import that does not end.
            Cancelled: by `cancel_fd`; end the process.
        """
        self._spawn()
        try:
            self._send(self._prepare)
            answer = self._receive(time.monotonic() + limit_s)
        except TimeoutError as error:
            stack = self._stack()
            self.end()
            raise RewardError(
                "Importing the reward functions does not end",
                got=stack or f"no answer after {limit_s:g} s",
                where=self._specs,
            ) from error
        except _GoneError as error:
            self.end()
            raise RewardError(
                "The process of the reward functions ended while it imported them",
                got=f"{error}; {self._limited}" if self._limited else str(error),
                do=_DO_RAISE if self._limited else "",
                where=self._specs,
            ) from error
        if isinstance(answer, Unusable):
            self.end()
            got, do = answer.got, answer.do
            if self._limited and any(sign in got for sign in _NO_MEMORY):
                got, do = f"{got}\n{self._limited}", do or _DO_RAISE
            raise RewardError(answer.what, got=got, needed=answer.needed, do=do, where=answer.where)
        assert isinstance(answer, Ready), f"the runner answers Prepare with {answer}"
        return answer

    def score(self, request: Score, limit_s: float) -> list[Returned] | Broke:
        """Call every function for one group.

        Args:
            request: the group.
            limit_s: for all functions together.

        Returns:
            What each function returned, or the first function that failed. After a time-out or a crash the process is
            gone; the next call starts a new one.

        Raises:
            RewardError: the process had to be started anew and could not.
            Cancelled: by `cancel_fd`; end the process.
        """
        if self._process is None:
            self.start()
        deadline = time.monotonic() + limit_s
        done: list[Returned] = []
        try:
            self._send(request)
            while len(done) < len(self._prepare.functions):
                match self._receive(deadline):
                    case Entered(function=index) if index == len(done):
                        pass
                    case Returned(function=index) as answer if index == len(done):
                        done.append(answer)
                    case Broke(function=index) as answer if index == len(done):
                        return answer
                    case answer:
                        raise _GoneError(f"it answered {type(answer).__name__} out of turn")
        except TimeoutError:
            stack = self._stack()
            detail = f"no answer after {limit_s:g} s" + (f"\n{stack}" if stack else "")
            self.end()
            return Broke(function=len(done), problem=RewardProblem.TIMED_OUT, detail=detail)
        except _GoneError as error:
            self.end()
            detail = f"no answer, the process that ran it was lost: {error}"
            return Broke(function=len(done), problem=RewardProblem.RAISED, detail=detail)
        except BaseException:
            self.end()  # what it would still answer belongs to this group, not to the next one
            raise
        return done

    def end(self) -> None:
        """Kill the process and what it started, if it is there."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session, so its own group
        process.wait(timeout=SEND_LIMIT_S)
        self._print()
        self._channel.close()
        for fd in (self._pidfd, self._stack_fd, self._output_fd):
            os.close(fd)

    @property
    def _limited(self) -> str:
        """What the process may have, in words; empty: there is no limit."""
        limit_bytes = self._prepare.memory_limit_bytes
        return f"it may have {limit_bytes} bytes of address space (rewards.memory_limit)" if limit_bytes else ""

    @property
    def _specs(self) -> str:
        return ", ".join(function.spec for function in self._prepare.functions)

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        stack_fd = os.memfd_create("reward-stack")
        output_fd, print_fd = os.pipe()
        command = own("rollplex.rewards.runner", str(theirs.fileno()), str(stack_fd))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ROLLPLEX_")}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=print_fd,
                stderr=print_fd,
                pass_fds=(theirs.fileno(), stack_fd),
                start_new_session=True,
                env={**kept, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
            )
        finally:
            theirs.close()
            os.close(print_fd)
        os.set_blocking(output_fd, False)
        ours.settimeout(SEND_LIMIT_S)
        self._channel, self._stack_fd, self._output_fd = ours, stack_fd, output_fd
        self._pidfd = os.pidfd_open(self._process.pid)
        self._received = bytearray()

    def _send(self, message: Prepare | Score) -> None:
        try:
            self._channel.sendall(frame(message))
        except OSError as error:
            raise _GoneError(self._fate(error)) from error

    def _receive(self, deadline: float) -> FromRunner:
        """The next message. Raises TimeoutError, Cancelled, or _GoneError if none will come."""
        poll = select.poll()
        for fd in (self._channel.fileno(), self._pidfd, self._output_fd, self._cancel_fd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while True:
            message = self._complete()
            if message is not None:
                return message
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            ready = {fd for fd, _ in poll.poll(left_s * 1000)}
            if self._cancel_fd in ready:
                raise Cancelled
            if self._output_fd in ready and not self._print():
                poll.unregister(self._output_fd)
            if self._channel.fileno() in ready:
                self._read()
            elif self._pidfd in ready:
                raise _GoneError(self._fate(None))

    def _complete(self) -> FromRunner | None:
        """Take a whole message out of what was received."""
        size = int.from_bytes(self._received[:LENGTH_BYTES], "little")
        end = LENGTH_BYTES + size
        if size > MAX_FRAME_BYTES:
            raise _GoneError(f"it sent a message of {size} bytes")
        if len(self._received) < max(end, LENGTH_BYTES + 1):
            return None
        body = bytes(self._received[LENGTH_BYTES:end])
        del self._received[:end]
        try:
            return FROM_RUNNER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _GoneError(f"it sent what is no message: {error}") from error

    def _read(self) -> None:
        try:
            content = self._channel.recv(_CHUNK_BYTES)
        except OSError as error:
            raise _GoneError(self._fate(error)) from error
        if not content:
            raise _GoneError(self._fate(None))
        self._received += content

    def _print(self) -> bool:
        """Pass on what was printed, up to the limit. False: nobody can print any more."""
        try:
            content = os.read(self._output_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        passed, self._output_left = content[: self._output_left], max(0, self._output_left - len(content))
        if passed:
            self._log(passed)
        if len(content) > len(passed) and passed:
            self._log(f"\n[what reward functions print beyond {self._output_limit} bytes is dropped]\n".encode())
        return bool(content)

    def _stack(self) -> str:
        """Where the process is now, as it says itself; empty if it does not."""
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACK_WAIT_S
        while not os.fstat(self._stack_fd).st_size and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.01)
        text = os.pread(self._stack_fd, _CHUNK_BYTES, 0).decode(errors="replace")
        kept = [line for line in text.splitlines() if "/rollplex/rewards/" not in line and "<frozen " not in line]
        return "\n".join(kept[:12])

    def _fate(self, error: OSError | None) -> str:
        """How the process ended, in words."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return f"it closed its channel{f' ({error})' if error else ''}"
        if code < 0:
            why = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
            return f"ended by {signal.Signals(-code).name}{why}"
        return f"ended with exit code {code}"
