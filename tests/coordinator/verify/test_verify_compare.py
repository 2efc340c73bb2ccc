"""Largest differences: where, how much, and what never passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollplex.layout.parameters import ParameterTable, Piece, Stored, _placed
from rollplex_coordinator.verify import gradients as module
from rollplex_coordinator.verify.compare import FLOOR, compare_gradients, compare_logprobs
from rollplex_coordinator.verify.gradients import Gradients


def table(dtype: str) -> ParameterTable:
    """q and k fused, an MLP with padded columns, a bias."""

    def entry(name: str, shape: tuple[int, ...], *pieces: Piece) -> Stored:
        return Stored(
            name=name, shape=shape, offset=0, size_bytes=0, tower="text", trainable=True, decay=True, pieces=pieces
        )

    return _placed(
        [
            entry(
                "qk",
                (5, 4),
                Piece(hf_name="q.weight", hf_shape=(3, 4), rows=(0, 3)),
                Piece(hf_name="k.weight", hf_shape=(2, 4), rows=(3, 5)),
            ),
            entry("down", (3, 8), Piece(hf_name="down.weight", hf_shape=(3, 6), rows=(0, 3), cols=(0, 6))),
            entry("bias", (7,), Piece(hf_name="bias", hf_shape=(7,), rows=(0, 7))),
        ],
        dtype,
        0,
    )


def arena(dtype: str, seed: int = 0, scale: float = 1.0) -> tuple[Gradients, dict[str, torch.Tensor]]:
    """An arena of random numbers, 99 in padding and gaps, and its parameters by name."""
    layout = table(dtype)
    kind = getattr(torch, dtype)
    flat = torch.full((layout.total_bytes // kind.itemsize,), 99.0, dtype=kind)
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for stored in layout.entries:
        start = stored.offset // kind.itemsize
        whole = flat[start : start + stored.size_bytes // kind.itemsize].view(stored.shape)
        for piece in stored.pieces:
            part = whole[slice(*piece.rows)] if piece.cols is None else whole[slice(*piece.rows), slice(*piece.cols)]
            part.copy_(torch.randn(part.shape, generator=generator) * scale)
            parameters[piece.hf_name] = part
    return Gradients(flat.view(torch.uint8).numpy(), layout), parameters


@pytest.mark.parametrize("block", [2**20, 8, 1], ids=["one block", "two rows a block", "a row a block"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_parameters_are_read_out_of_the_arena_without_their_padding(
    dtype: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_NUMBERS", block)
    gradients, parameters = arena(dtype)
    assert gradients.names == tuple(parameters)
    for name, value in parameters.items():
        blocks = list(gradients.blocks(name))
        assert all(part.dtype == np.float64 for part in blocks)
        assert np.array_equal(np.concatenate(blocks), value.double().flatten().numpy()), name
        assert max(map(len, blocks)) <= max(block, value[:1].numel())


def test_a_copy_stays_when_the_arena_changes() -> None:
    gradients, parameters = arena("float32")
    kept = gradients.copied()
    assert compare_gradients(kept, gradients, 0.0).largest == 0.0
    parameters["bias"][2] += 1.0
    assert compare_gradients(kept, gradients, 0.5).parameter == "bias"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parameter_that_differs_most_is_named_relative_to_its_own_largest(dtype: str) -> None:
    ours, changed = arena(dtype)
    theirs, parameters = arena(dtype)
    parameters["q.weight"][:] = changed["q.weight"][:] = 0.001
    changed["q.weight"][1, 2] = 0.0015
    changed["bias"][0] += 0.05
    found = compare_gradients(ours, theirs, 0.1)
    assert found.parameter == "q.weight"
    largest = max(float(value.abs().max()) for value in parameters.values())
    assert found.largest == pytest.approx(0.0005 / max(0.001, FLOOR * largest), rel=0.02)
    assert (found.parameters, found.zero, found.beyond, found.passed) == (4, 0, 1, False)


def test_a_parameter_that_is_all_rounding_does_not_shout() -> None:
    ours, changed = arena("float32")
    theirs, parameters = arena("float32")
    changed["k.weight"][:], parameters["k.weight"][:] = 1e-9, -1e-9
    found = compare_gradients(ours, theirs, 1e-5)
    assert found.passed
    assert found.largest is not None
    assert 0.0 < found.largest < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("both", [False, True])
def test_what_is_not_finite_never_passes(bad: float, both: bool) -> None:
    ours, changed = arena("float32")
    theirs, parameters = arena("float32")
    changed["down.weight"][2, 5] = bad
    if both:
        parameters["down.weight"][2, 5] = bad
    for one, other in ((ours, theirs), (theirs, ours)):
        found = compare_gradients(one, other, math.inf)
        assert (found.largest, found.parameter, found.beyond, found.passed) == (None, "down.weight", 1, False)


def test_padding_is_nobodys_gradient() -> None:
    ours, _ = arena("float32")
    theirs, _ = arena("float32")
    theirs._content.view(np.float32)[ours._content.view(np.float32) == 99.0] = -99.0
    assert compare_gradients(ours, theirs, 0.0).passed


def test_nothing_but_zeros_is_nothing_compared() -> None:
    ours, _ = arena("float32", scale=0.0)
    theirs, parameters = arena("float32", scale=0.0)
    found = compare_gradients(ours, theirs, 1.0)
    assert (found.zero, found.parameters, found.passed) == (4, 4, False)
    parameters["bias"][:] = 1e-12
    found = compare_gradients(ours, theirs, 0.5)
    assert (found.zero, found.passed, found.parameter) == (3, False, "bias")


def test_a_gradient_where_there_should_be_none_is_a_difference() -> None:
    ours, changed = arena("float32", scale=0.0)
    theirs, _ = arena("float32", scale=0.0)
    changed["bias"][3] = 1e-6
    found = compare_gradients(ours, theirs, 1.0)
    assert (found.largest, found.parameter, found.beyond) == (None, "bias", 1)


def test_the_sample_and_token_of_the_largest_difference_are_found() -> None:
    theirs = np.linspace(-3.0, -1.0, 9)
    for index, (sample, position) in {0: (0, 0), 3: (0, 3), 4: (1, 0), 5: (2, 0), 8: (2, 3)}.items():
        ours = theirs.copy()
        ours[index] += 0.25
        found = compare_logprobs(ours, theirs, (4, 1, 4), 0.2)
        assert (found.sample, found.position) == (sample, position)
        assert found.largest == pytest.approx(0.25)
        assert (found.tokens, found.beyond, found.passed) == (9, 1, False)
        assert compare_logprobs(ours, theirs, (4, 1, 4), 0.3).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_not_finite_never_passes(bad: float) -> None:
    theirs = np.full(5, -1.0)
    ours = theirs.copy()
    ours[3] = bad
    for one, other in ((ours, theirs), (theirs, ours), (ours, ours)):
        found = compare_logprobs(one, other, (2, 3), math.inf)
        assert (found.largest, found.sample, found.position, found.beyond) == (None, 1, 1, 1)
        assert not found.passed


def test_lengths_that_do_not_fit_are_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="for 4 tokens"):
        compare_logprobs(np.zeros(3), np.zeros(3), (4,), 1.0)


def test_a_tolerance_that_is_no_number_passes_nothing() -> None:
    ours, _ = arena("float32")
    assert not compare_logprobs(np.zeros(3), np.zeros(3), (3,), math.nan).passed
    assert not compare_gradients(ours, ours, math.nan).passed
