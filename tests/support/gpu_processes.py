"""Who is on a GPU, by what each process is to a node."""

from __future__ import annotations

from pathlib import Path

from rollplex.nvml import Gpu

ROLES = {"rollplex_trainer": "trainer", "rollplex_prefix": "prefix", "rollplex_rollout": "rollout"}
MPS = "nvidia-cuda-mps"


def roles_on(gpu: Gpu) -> dict[int, str]:
    """Processes that have a context on it, without those of MPS: by pid a role, where a child of a worker has that of
    its parent, or the words that it was started with. Processes that end meanwhile are not there.

    A process that only maps memory of this GPU, by NCCL or a peer's segment, is a client of MPS that holds 0 bytes."""
    found: dict[int, str] = {}
    for process in gpu.processes():
        if process.used_bytes == 0:
            continue
        try:
            if not any(MPS in word for word in _words(process.pid)):
                found[process.pid] = _role(process.pid)
        except FileNotFoundError:
            continue
    return found


def variables_of(pid: int) -> dict[str, str]:
    """Those that it was started with; of a process that has changed its title only under SPT_NOENV=1."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _role(pid: int) -> str:
    parent = pid
    while parent > 1:
        for module, role in ROLES.items():
            if module in _words(parent):
                return role
        parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    return " ".join(_words(pid)).strip() or f"pid {pid}"


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
