"""`python warm_zygote.py SOCKET MODULE...`: imports what workers import, and forks a worker for each request.

Owns the requests of `warm_site/sitecustomize.py` and the ends of the workers. It has one thread and computes nothing,
so that a fork is safe: no lock is held by a thread that the child does not have, and no pool of OpenMP or autograd
exists. It imports at the first request, so that a test run without nodes pays nothing.

A worker dies with its proxy: the kernel sends it SIGKILL when the pipe that the proxy holds is closed (O_ASYNC with
F_SETSIG; no thread in the worker watches). It dies with this process, too.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sitecustomize import circumstances  # type: ignore[import-not-found] # of warm_site, which is on its path

AT_IMPORT = (
    "PYTHON",
    "LD_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "CUDA_",
    "CUBLAS_",
    "TORCH",
    "PYTORCH_",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TRANS",
    "TOKEN",
)
"""Beginnings of variables that are read while something is imported: they cannot be another worker's."""
MAX_REQUEST_BYTES = 1 << 20
REQUEST_S = 10.0
PR_SET_PDEATHSIG = 1


@dataclass
class Worker:
    """What a forked child is to become."""

    argv: list[str]
    safe_path: bool
    cwd: str
    environment: dict[str, str]
    umask: int
    fds: Sequence[int]


class Zygote:
    """Waits for requests and for the ends of workers. unblocked by: either; it ends by a signal."""

    def __init__(self, listener: socket.socket, modules: Sequence[str]) -> None:
        self._listener = listener
        self._modules = modules
        self._mine: dict[str, Any] = circumstances()
        self._mine["descriptors"] = 3
        self._environment = dict(os.environ)
        self._loaded = False
        self._workers: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, connection of its proxy

    def serve(self) -> Worker:
        """Returns in a forked child only, which is to become that worker."""
        while True:
            poll = select.poll()
            for fd in (self._listener.fileno(), *self._workers):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd in self._workers:
                    self._ended(fd)
                elif (worker := self._accept()) is not None:
                    return worker

    def _ended(self, pidfd: int) -> None:
        pid, proxy = self._workers.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        with proxy:
            _tell(proxy, {"status": status})

    def _accept(self) -> Worker | None:
        proxy, _ = self._listener.accept()
        proxy.settimeout(REQUEST_S)
        payload, fds, _, _ = socket.recv_fds(proxy, MAX_REQUEST_BYTES, 4)
        if len(fds) != 4:
            proxy.close()  # its process ended before it asked
            return None
        request = json.loads(payload)
        reason = self._refusal(request.pop("circumstances"), request["environment"])
        if reason:
            _tell(proxy, {"no": reason})
            proxy.close()
        else:
            self._load()
            here = os.getpid()
            if (pid := os.fork()) == 0:
                self._forget(proxy)
                _end_with(here, fds[3])
                return Worker(fds=fds, **request)
            self._workers[os.pidfd_open(pid)] = pid, proxy
            _tell(proxy, {"pid": pid})
        for fd in fds:
            os.close(fd)
        return None

    def _refusal(self, theirs: Mapping[str, Any], environment: Mapping[str, str]) -> str:
        """Why this start must be a real one; empty if a fork is as good."""
        ours = json.loads(json.dumps(self._mine))
        different = sorted(name for name in ours if ours[name] != theirs.get(name))
        names = sorted({*environment, *self._environment})
        different += [
            name
            for name in names
            if name.startswith(AT_IMPORT) and environment.get(name) != self._environment.get(name)
        ]
        return ", ".join(different)

    def _load(self) -> None:
        if self._loaded:
            return
        for module in self._modules:
            importlib.import_module(module)
        threads = list(Path("/proc/self/task").iterdir())
        assert len(threads) == 1, f"a process with {len(threads)} threads must not fork: {threads}"
        gc.collect()
        gc.freeze()  # children do not copy what they never change
        self._loaded = True

    def _forget(self, proxy: socket.socket) -> None:
        """In a child: what is the warm process's."""
        self._listener.close()
        proxy.close()
        for pidfd, (_, other) in self._workers.items():
            os.close(pidfd)
            other.close()


def _tell(proxy: socket.socket, answer: Mapping[str, Any]) -> None:
    try:
        proxy.send(json.dumps(answer).encode())
    except ConnectionError:
        return  # the proxy was killed, and with it its worker


def _end_with(zygote: int, life: int) -> None:
    """The kernel kills this process when the warm process or the proxy ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(life, select.POLLIN)
    if poll.poll(0) or os.getppid() != zygote:
        os._exit(-signal.SIGKILL & 0xFF)


def _become(worker: Worker) -> None:
    """As `python -m MODULE ARGUMENTS` would have begun."""
    os.setsid()
    for number, fd in enumerate(worker.fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(worker.cwd)
    os.umask(worker.umask)
    os.environ.clear()
    os.environ.update(worker.environment)
    sys.orig_argv = [sys.executable, *(["-P"] if worker.safe_path else []), "-m", *worker.argv]
    sys.argv = list(worker.argv)
    sys.path[:1] = [] if worker.safe_path else [worker.cwd]


def main() -> None:
    """Serve; in a child, be the worker."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        print("ready", flush=True)
        worker = Zygote(listener, sys.argv[2:]).serve()
    _become(worker)
    runpy.run_module(worker.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
