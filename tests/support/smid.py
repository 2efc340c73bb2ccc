"""A kernel whose blocks write down which multiprocessor they ran on. As a program: share and side of this process."""

# pyright: reportIndexIssue=false
# Without Triton a kernel looks like a function, which has no `[grid]`.

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS_EACH = 32
"""Blocks of one warp for each multiprocessor: as many as one can hold, so that all of them are used."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _note(out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Triton looks names of annotations up
    lane = tl.arange(0, 32)
    here = tl.inline_asm_elementwise(
        "nanosleep.u32 20000; mov.u32 $0, %smid;", "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out + tl.program_id(0) * 32 + lane, here)


def blocks() -> Tensor:
    """Room for what the blocks write, int32 [blocks, 32]."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return torch.full((count * BLOCKS_EACH, 32), -1, dtype=torch.int32, device="cuda")


def fill(out: Tensor) -> None:
    """Run the kernel on the current stream of the current context."""
    _note[(out.shape[0],)](out, num_warps=1)


def members(out: Tensor) -> set[int]:
    """The multiprocessors that were written down."""
    return set(out.flatten().tolist())


def where() -> set[int]:
    """The multiprocessors that a kernel started now is on."""
    out = blocks()
    fill(out)
    return members(out)


if __name__ == "__main__":
    from rollplex.multiprocessors import Multiprocessors, Side
    from rollplex.multiprocessors.green import GreenDriver

    torch.zeros(1, device="cuda")
    with Multiprocessors(GreenDriver).on_share(float(sys.argv[1]), Side(sys.argv[2])):
        print(json.dumps(sorted(where())))
