"""Who is on a GPU, by what each process is to a node."""

from __future__ import annotations

from pathlib import Path

from rollplex.nvml import Gpu

ROLES = {"rollplex_trainer": "trainer", "rollplex_prefix": "prefix", "rollplex_rollout": "rollout"}
MPS, GONE = "mps", "gone"
_MPS_PROGRAM = "nvidia-cuda-mps"


def processes_on(gpu: Gpu) -> dict[int, str]:
    """All that the driver lists, by pid: `MPS`, `GONE` if it has ended, a role, where a child of a worker has that of
    its parent, or the words that it was started with."""
    return {process.pid: _what(process.pid) for process in gpu.processes()}


def contexts_on(gpu: Gpu) -> dict[int, str]:
    """Of these those that hold memory of the GPU, without MPS's own. A process that only maps memory of this GPU, by
    NCCL or a peer's segment, is a client of MPS that holds 0 bytes."""
    holding = {process.pid for process in gpu.processes() if process.used_bytes != 0}
    return {pid: what for pid, what in processes_on(gpu).items() if pid in holding and what not in {MPS, GONE}}


def worker_of(pid: int) -> int:
    """The worker that a process is, or a child of."""
    while pid > 1 and not any(module in _words(pid) for module in ROLES):
        pid = _parent(pid)
    return pid


def variables_of(pid: int) -> dict[str, str]:
    """Those that it was started with; of a process that has changed its title only under SPT_NOENV=1."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _what(pid: int) -> str:
    try:
        words = _words(pid)
        if any(_MPS_PROGRAM in word for word in words):
            return MPS
        found = [role for module, role in ROLES.items() if module in _words(worker_of(pid))]
    except FileNotFoundError:
        return GONE
    return found[0] if found else " ".join(words).strip() or f"pid {pid}"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
