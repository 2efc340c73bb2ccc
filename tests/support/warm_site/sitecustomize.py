"""Read by every Python process that a test starts: a worker's start is handed over to the warm process (support.warm).

This process stays in front of the worker as its proxy: it passes signals on, and ends as the worker ends. When this
process is killed, the worker is killed too, by the kernel (`support.warm_zygote`). Knows nothing of what a worker does.
Anything that is not exactly such a start goes on as if this file were not there; so does a start that is refused.

    worker's command ──► this file ── argv, cwd, environment, descriptors ──► warm process ── fork ──► worker
                          │ ◄── pid, then how it ended ──────────────────────────┘
                          └── SIGTERM and its like, to that pid
"""

from __future__ import annotations

import os
import sys

VARIABLE = "ROLLPLEX_TEST_ZYGOTE"
MODULES = frozenset(
    {
        "rollplex_trainer",
        "rollplex_prefix",
        "rollplex_rollout",
        "rollplex.conformance",
        "warm_probe",
        "warm_broken",
        "warm_simple",
    }
)
PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGABRT")
NAMESPACES = ("mnt", "net", "pid", "user")


def _is_ours() -> bool:
    """`python [-P] -m WORKER ...` without another option of the interpreter, in the reach of a warm process."""
    words = [word for number, word in enumerate(sys.orig_argv) if (number, word) != (1, "-P")]
    return len(words) > 2 and words[1] == "-m" and words[2] in MODULES and bool(os.environ.get(VARIABLE))


def circumstances() -> dict[str, object]:
    """What the warm process cannot give to a worker; it must be the same for both."""
    import resource
    from pathlib import Path

    names = sorted(name for name in vars(resource) if name.startswith("RLIMIT_"))
    return {
        "executable": sys.executable,
        "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getegid()],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
        "namespaces": {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in NAMESPACES},
        "descriptors": len(list(Path("/proc/self/fd").iterdir())) - 1,
    }


def _hand_over() -> None:
    """Does not return if the warm process took this start."""
    import json
    import signal
    import socket
    from pathlib import Path

    passed = {getattr(signal, name) for name in PASSED_ON}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed)  # until it is known whom to pass them to
    life, held = os.pipe()
    request = {
        "argv": sys.orig_argv[3 if sys.flags.safe_path else 2 :],
        "safe_path": sys.flags.safe_path,
        "cwd": str(Path.cwd()),
        "environment": dict(os.environ),
        "umask": _umask(),
        "circumstances": circumstances(),
    }
    request["circumstances"]["descriptors"] -= 2  # type: ignore[index] # the pipe's
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as zygote:
        zygote.connect(os.environ[VARIABLE])
        socket.send_fds(zygote, [json.dumps(request).encode()], [0, 1, 2, life])
        os.close(life)
        answer = json.loads(zygote.recv(4096) or b"{}")
        if not answer:
            _end_as(signal.SIGKILL)  # the warm process is gone, and with it a worker that it may have forked
        if "no" in answer:
            os.close(held)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
            return
        for number in passed:
            signal.signal(number, lambda number, _frame: _pass_on(answer["pid"], number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
        end = json.loads(zygote.recv(4096) or b"{}")
    _end_as(end.get("status", signal.SIGKILL))


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _pass_on(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has just ended, and its end will be heard


def _end_as(status: int) -> None:
    """End this process with the wait status of another."""
    import signal

    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if _is_ours():
    _hand_over()
