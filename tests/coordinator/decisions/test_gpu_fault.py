"""Which errors are faults of the GPU, and how one is told."""

from __future__ import annotations

import pytest

from rollplex_coordinator.decisions.gpu_fault import group_note, is_gpu_fault


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported",
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "CUDA_ERROR_ILLEGAL_ADDRESS in cuMemUnmap",
        "what():  CUDA error: device-side assert triggered",
    ],
)
def test_what_no_process_survives_is_a_fault(text: str) -> None:
    assert is_gpu_fault(text)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY in cuMemCreate",
        "exit code 1",
        "row 3: no image",
    ],
)
def test_a_lack_of_memory_or_of_anything_else_is_none(text: str) -> None:
    assert not is_gpu_fault(text)


def test_one_cause_is_told_for_all() -> None:
    text = group_note("trainer", ["rollout", "prefix"], daemon_alive=True)
    assert "ends all of the GPU's clients: trainer was the first to tell, and prefix and rollout cannot go on" in text
    assert "--resume" in text
    assert text.endswith("newest checkpoint.")
    assert group_note("trainer", [], daemon_alive=False).endswith("The MPS daemon has ended too.")
