"""A fault of the GPU, told once for all who die of it. Pure.

Under MPS the workers share the GPU's context: an illegal access of one is reported to each, with the same words, and
none of them can use the GPU any more. So three deaths have one cause, and who told first need not be who did it. The
workers start again together: a fresh client works only when all old ones have left.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_FAULT = re.compile(
    r"CUDA error|CUDA_ERROR_\w+|cudaError\w+|illegal memory access|device-side assert|unspecified launch failure"
    r"|an illegal instruction was encountered|misaligned address|uncorrectable ECC"
)
_SHORT_OF_MEMORY = re.compile(r"out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation", re.IGNORECASE)


def is_gpu_fault(text: str) -> bool:
    """Whether an error, or the end of a log, speaks of a fault of the GPU: one that no process survives. A lack of
    memory is none: only who asked for it fails."""
    return _FAULT.search(text) is not None and _SHORT_OF_MEMORY.search(text) is None


def group_note(first: str, others: Collection[str], *, daemon_alive: bool) -> str:
    """What the end of a run says of a fault under MPS.

    Args:
        first: the worker that told of it, or died, first.
        others: those that shared the GPU with it.
        daemon_alive: the MPS daemon still runs.
    """
    text = (
        f"A GPU fault under MPS ends all of the GPU's clients: {first} was the first to tell, and "
        f"{' and '.join(sorted(others)) or 'nobody'} cannot go on either, whoever caused it. The workers start again "
        "together: `rollplex up --resume` goes on from the newest checkpoint."
    )
    return text if daemon_alive else f"{text} The MPS daemon has ended too."
