"""`python -m warm_probe WHAT [NUMBER]`: a worker in tests of the warm process: says what it sees, or ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time


def _seen() -> dict[str, object]:
    os.umask(mask := os.umask(0o077))
    return {
        "argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]],  # noqa: PTH119 - no more is imported than needed
        "cwd": os.getcwd(),  # noqa: PTH109
        "first on the path": sys.path[0],
        "rest of the path": sorted(set(sys.path[1:])),
        "environment": dict(os.environ),
        "umask": mask,
        "leads its session": os.getsid(0) == os.getpid(),
        "stdin": sys.stdin.read(),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "name": __name__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "terms are caught": signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL,
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
    }


def main() -> None:
    """Each way of a worker to be or to end."""
    match sys.argv[1:]:
        case ["see"]:
            print(json.dumps(_seen()))
        case ["warm"]:
            print(os.getppid(), "torch" in sys.modules)
        case ["exit", code]:
            sys.exit(int(code))
        case ["raise"]:
            raise ValueError("as it was meant to")
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
        case ["obey"]:
            signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(number + 1))
            _wait()
        case ["wait"]:
            _wait()
        case ["stand still"]:
            print(os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)


def _wait() -> None:
    print(os.getpid(), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
