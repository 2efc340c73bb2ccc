"""Green contexts on a real GPU: kernels say themselves on which multiprocessor they ran."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rollplex.multiprocessors import Multiprocessors, Side
from rollplex.multiprocessors.green import GreenDriver

pytestmark = pytest.mark.gpu
PROBE = Path(__file__).parent.parent / "support" / "smid.py"
PAIRS = [(0.36, 0.64), (0.5, 0.5), (0.25, 0.5), (0.36, 0.36), (0.1, 0.9)]
"""Of decoding and of prefix work; together at most 1."""


@pytest.fixture(scope="module")
def shares() -> Multiprocessors:
    torch.zeros(1, device="cuda")
    return Multiprocessors(GreenDriver)


@pytest.fixture(scope="module")
def where() -> Callable[[], set[int]]:
    """Runs a kernel of many blocks; the multiprocessors that they were on."""
    pytest.importorskip("triton")
    from support.smid import where

    return where


@pytest.mark.parametrize(("decode", "prefix"), PAIRS)
def test_two_shares_are_disjoint_and_used_in_whole(
    shares: Multiprocessors, where: Callable[[], set[int]], decode: float, prefix: float
) -> None:
    seen = {}
    for share, side in ((decode, Side.FIRST), (prefix, Side.LAST)):
        with shares.on_share(share, side):
            seen[side] = where()
        assert len(seen[side]) == shares.part(share, side).count
    assert seen[Side.FIRST].isdisjoint(seen[Side.LAST])
    assert len(where()) == torch.cuda.get_device_properties(0).multi_processor_count


def test_two_processes_cut_alike(shares: Multiprocessors, where: Callable[[], set[int]]) -> None:
    with shares.on_share(0.36, Side.FIRST):
        here = where()
    command = [sys.executable, str(PROBE), "0.64", "last"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    there = set(json.loads(told))
    assert here.isdisjoint(there)
    assert here | there == where()


def test_a_graph_captured_on_a_shares_stream_keeps_to_it_wherever_it_is_launched(
    shares: Multiprocessors, where: Callable[[], set[int]]
) -> None:
    from support.smid import blocks, fill, members

    stream = torch.cuda.ExternalStream(shares.stream(0.36, Side.FIRST))  # type: ignore[no-untyped-call]
    out = blocks()
    with torch.cuda.stream(stream):
        fill(out)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        fill(out)
    with shares.on_share(0.36, Side.FIRST):
        part = where()
    for launched_on in (torch.cuda.current_stream(), torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        out.fill_(-1)
        torch.cuda.synchronize()
        with torch.cuda.stream(launched_on):
            graph.replay()
        torch.cuda.synchronize()
        assert members(out) == part


def test_a_backward_of_a_limited_forward_has_the_whole_device(
    shares: Multiprocessors, where: Callable[[], set[int]]
) -> None:
    seen: dict[str, set[int]] = {}

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen["forward"] = where()
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            seen["backward"] = where()
            return gradients[0] * 2

    x = torch.ones(8, device="cuda", requires_grad=True)
    with shares.on_share(0.5, Side.LAST):
        y = Noted.apply(x).sum()  # type: ignore[no-untyped-call]
    y.backward()
    assert len(seen["forward"]) == shares.part(0.5, Side.LAST).count
    assert len(seen["backward"]) == torch.cuda.get_device_properties(0).multi_processor_count
    assert torch.equal(x.grad, torch.full_like(x, 2.0)) if x.grad is not None else False


def operations() -> dict[str, Callable[[], Tensor]]:
    """What a prefix forward is made of: the libraries that launch kernels in their own ways."""
    torch.manual_seed(1)
    x = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 16, 1024, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2, 1024, 128, device="cuda", dtype=torch.bfloat16)
    patches = torch.randn(256, 3, 2, 14, 14, device="cuda", dtype=torch.bfloat16)
    kernel = torch.randn(64, 3, 2, 14, 14, device="cuda", dtype=torch.bfloat16)
    return {
        "linear": lambda: functional.linear(x, w),
        "attention": lambda: functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True),
        "convolution": lambda: functional.conv3d(patches, kernel, stride=(2, 14, 14)),
        "norm": lambda: functional.rms_norm(x, (2048,)),
        "copy": lambda: torch.arange(4096).pin_memory().to("cuda", non_blocking=True).float(),
    }


@pytest.mark.parametrize("name", ["linear", "attention", "convolution", "norm", "copy"])
def test_libraries_compute_the_same_on_a_share(shares: Multiprocessors, name: str) -> None:
    operation = operations()[name]
    whole = operation()
    with shares.on_share(0.5, Side.LAST):
        limited = operation()
    torch.testing.assert_close(limited.float(), whole.float(), rtol=2e-2, atol=2e-2 * float(whole.float().abs().max()))


@pytest.mark.parametrize("name", ["linear", "attention", "convolution", "norm"])
def test_a_share_changes_no_bits(shares: Multiprocessors, name: str) -> None:
    """Serial and overlap are to have one result. A library that chooses its way by the number of multiprocessors would
    be found here."""
    operation = operations()[name]
    whole = operation()
    with shares.on_share(0.64, Side.LAST):
        limited = operation()
    assert torch.equal(whole, limited)


def test_parts_cost_little_memory(record_property: Callable[[str, object], None]) -> None:
    torch.zeros(1, device="cuda")
    fresh = Multiprocessors(GreenDriver)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for share in (0.3, 0.7):
        with fresh.on_share(share, Side.LAST):
            torch.zeros(1, device="cuda")
    taken = before - torch.cuda.mem_get_info()[0]
    record_property("bytes of two parts", taken)
    print(f"two parts took {taken / 2**20:.1f} MiB")
    assert taken < 256 * 2**20


def test_what_torch_launches_is_limited_too(shares: Multiprocessors) -> None:
    """Kernels of cuBLAS cannot say where they were; on a sixteenth of the device they take many times as long."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def seconds() -> float:
        torch.cuda.synchronize()
        start_s = time.monotonic()
        for _ in range(5):
            torch.matmul(a, a)
        torch.cuda.synchronize()
        return time.monotonic() - start_s

    seconds()
    whole = seconds()
    with shares.on_share(0.06, Side.FIRST):
        seconds()
        limited = seconds()
    assert limited > 4.0 * whole
    assert seconds() < 2.0 * whole
