"""A program that behaves as `nvidia-cuda-mps-control` does, on a machine without a GPU.

It is put on PATH under that name. What it is to do wrong is told by FAKE_MPS: fail, hang, no_pid, deaf (the daemon does
not answer), stubborn (it does not quit), clings (it ends only by SIGKILL). Every command is a line of FAKE_MPS_CALLS.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """#!{python} -S
# nvidia-cuda-mps-control
import os, signal, sys, time
how = os.environ.get("FAKE_MPS", "")
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
def note(text):
    with open(os.environ["FAKE_MPS_CALLS"], "a") as file:
        file.write(text + "\\n")
if sys.argv[1:] == ["-d"]:
    note("-d " + os.environ["CUDA_VISIBLE_DEVICES"])
    if how == "fail":
        print("Cannot find MPS control daemon process")
        sys.exit(1)
    if how == "hang":
        time.sleep(600)
    if os.fork():
        os._exit(0)
    os.setsid()
    if how != "no_pid":
        with open(pipe + "/nvidia-cuda-mps-control.pid", "w") as file:
            file.write(str(os.getpid()) + "\\n")
    if how == "clings":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    os._exit(0)
command = sys.stdin.read().strip()
note(command)
if how == "deaf":
    time.sleep(600)
try:
    pid = int(open(pipe + "/nvidia-cuda-mps-control.pid").read())
except OSError:
    print("Cannot find MPS control daemon process")
    sys.exit(1)
if command == "get_server_list":
    print("4242")
if command.startswith("quit") and how not in ("stubborn", "clings"):
    os.kill(pid, signal.SIGTERM)
if command.startswith("terminate_client"):
    client = int(command.split()[2])
    if os.environ.get("FAKE_MPS_TERMINATES"):
        os.kill(client, signal.SIGKILL)
"""


def install(folder: Path) -> dict[str, str]:
    """Put the program into a folder; returns the environment in which it is found and writes its calls."""
    program = folder / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:/usr/bin:/bin", "FAKE_MPS_CALLS": str(folder / "calls")}


def calls(folder: Path) -> list[str]:
    """What was asked of it so far."""
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []
