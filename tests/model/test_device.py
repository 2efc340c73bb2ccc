"""What a GPU asks for that a host does not, as far as it is seen without one; tests/gpu/test_model.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollplex.errors import BudgetError, EngineError
from rollplex.model import device
from rollplex.model.setup import prepare_torch
from rollplex.protocol.common import Memory, ModelSpec

SPEC = ModelSpec(path="", dtype="bfloat16", freeze_vision=False, table_hash="", never_sampled=(), device=Memory.CUDA)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is set is set back."""
    for name in ("PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    parts = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = parts
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@pytest.mark.usefixtures("settings")
def test_a_gpu_that_torch_does_not_see_is_refused_with_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    with pytest.raises(EngineError, match=r"torch sees no GPU; got torch .*CUDA_VISIBLE_DEVICES GPU-7; needed one GPU"):
        prepare_torch(SPEC)


@pytest.mark.usefixtures("settings")
def test_precision_and_determinism_are_set_before_the_gpu_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert prepare_torch(SPEC) == torch.device("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
    assert torch.are_deterministic_algorithms_enabled()


def test_what_the_allocator_refuses_names_the_unit_what_was_predicted_and_the_cap() -> None:
    refused = "CUDA out of memory. Tried to allocate 20.00 GiB."
    with (
        pytest.raises(
            BudgetError, match=r"suffix unit 3 .*20\.00 GiB.*needed 700 bytes as predicted, at most 900 in all"
        ),
        device.private_memory("suffix unit 3", asked_bytes=700, cap_bytes=900),
    ):
        raise torch.OutOfMemoryError(refused)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), device.private_memory("unit", asked_bytes=1, cap_bytes=0):
        raise ZeroDivisionError


def test_a_host_has_no_cap_and_nothing_to_wait_for() -> None:
    host = device.torch_device(Memory.HOST)
    device.limit_private(host, 1)
    device.finish(host)
    assert bool(torch.ones(8, device=host).all())
