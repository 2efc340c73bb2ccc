"""The device that a worker computes on: its name, when its work is complete, how much of it the process may take.

Owns the four rules of a GPU that a host does not have:

    complete    Kernels run after the call that starts them has returned. Another process reads what a segment holds as
                soon as a message says so, and an unmapped segment must have no kernel in flight, so a service calls
                `finish` before it measures the end of a unit, unmaps a segment of it, or answers.
    explicit    Nothing is made on the device that torch happens to prefer: every tensor's device is named.
    capped      Private memory is what torch's allocator takes. Segments are mapped past it and do not count.
    returned    The allocator keeps what was freed until `trim`: at the gate, when no unit of the step is left.

Does not know: models, messages, segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rollplex.errors import BudgetError
from rollplex.protocol.common import Memory

HOST = torch.device("cpu")
"""Where bytes of messages become tensors."""


def torch_device(memory: Memory) -> torch.device:
    """A process sees one GPU, so it needs no number."""
    return torch.device("cuda") if memory is Memory.CUDA else HOST


def finish(device: torch.device) -> None:
    """Returns when everything that was started on `device` is complete."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trim(device: torch.device) -> None:
    """Give the device back what the allocator keeps of private memory that is free: its leases have ended, and another
    process may be granted it next. Not after each unit: the next one takes the same memory again."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def limit_private(device: torch.device, cap_bytes: int) -> None:
    """Lets torch's allocator take at most `cap_bytes` of a GPU. 0: no limit. On a host there is none.

    Raises:
        BudgetError: the GPU has less.
    """
    if device.type != "cuda" or not cap_bytes:
        return
    total_bytes = torch.cuda.mem_get_info(device)[1]
    if cap_bytes > total_bytes:
        raise BudgetError(
            "a process may take more private memory than its GPU has",
            got=f"{cap_bytes} bytes",
            needed=f"at most {total_bytes}",
            do="This is an error of Rollplex: the cap is planned from the budget.",
        )
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total_bytes, torch.cuda.current_device())


@contextmanager
def private_memory(unit: str, *, asked_bytes: int, cap_bytes: int) -> Iterator[None]:
    """Around the work of a unit: what the allocator refuses becomes an error that says what was planned.

    Args:
        unit: in words.
        asked_bytes: size of the leases that the unit runs under.
        cap_bytes: of the process (`limit_private`). 0: none.

    Raises:
        BudgetError: in place of torch's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"{unit} needs more private memory than there is",
            got=str(error),
            needed=f"{asked_bytes} bytes as predicted, " + (f"at most {cap_bytes} in all" if cap_bytes else "no cap"),
            do="Make the units smaller (batching.*), keep less (memory.prefix_activations), or raise memory.overhead.",
        ) from error
