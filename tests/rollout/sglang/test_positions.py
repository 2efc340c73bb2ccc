"""Where responses go on, computed at once as SGLang computes it one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollplex_rollout.sglang.positions import at_once


def one_by_one(self: Any, _runner: Any, batch: Any) -> None:
    """As SGLang 0.5.17 does in a decode step."""
    rows = []
    for length, pictured in zip(self.seq_lens_cpu.tolist(), batch.multimodal_inputs, strict=True):
        if pictured is None:
            rows.append(torch.full((3, 1), length - 1))
        elif pictured.mrope_positions.shape[1] >= length:
            rows.append(pictured.mrope_positions[:, length - 1 : length])
        else:
            rows.append((pictured.mrope_position_delta - 1).flatten().unsqueeze(0).repeat(3, 1) + length)
    self.mrope_positions = torch.cat(rows, dim=1)
    self.asked = True


def pictured(tokens: int, delta: int) -> Any:
    return SimpleNamespace(
        mrope_positions=torch.arange(3 * tokens).reshape(3, tokens), mrope_position_delta=torch.tensor([[delta]])
    )


def step(pictures: list[Any], lengths: list[int], *, decode: bool = True) -> Any:
    return (
        SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: decode),
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
            asked=False,
        ),
        SimpleNamespace(device="cpu"),
        SimpleNamespace(multimodal_inputs=pictures),
    )


@pytest.mark.parametrize("lengths", [[9, 31, 8], [10, 100, 40]])
def test_positions_of_a_step_are_sglangs(lengths: list[int]) -> None:
    pictures = [pictured(7, -3), None, pictured(7, 5)]
    for made in range(2):  # the second time by what was found in the first
        batch, *others = step(pictures, [length + made for length in lengths])
        expected, *_ = step(pictures, [length + made for length in lengths])
        at_once(one_by_one, batch, *others)
        one_by_one(expected, *others)
        assert not batch.asked
        assert batch.mrope_positions.dtype == torch.int64
        assert batch.mrope_positions.tolist() == expected.mrope_positions.tolist()


@pytest.mark.parametrize(("lengths", "decode"), [([7, 31], True), ([9, 31], False)])
def test_what_is_no_plain_step_is_left_to_sglang(lengths: list[int], *, decode: bool) -> None:
    batch, *others = step([pictured(7, -3), None], lengths, decode=decode)
    at_once(one_by_one, batch, *others)
    assert batch.asked
