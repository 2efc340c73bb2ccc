"""Responses between their bytes and padded tensors; torch as a worker sets it up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.errors import ProtocolError
from rollplex.model.responses import join_values, response_batch, split_values
from rollplex.model.setup import prepare_torch
from rollplex.protocol.common import Logprobs, ModelSpec, Responses


def group(number: int, *samples: list[int]) -> Responses:
    flat = [token for sample in samples for token in sample]
    return Responses(group=number, lengths=tuple(map(len, samples)), tokens=np.array(flat, dtype="<i4").tobytes())


GROUPS = [group(4, [1, 2, 3], [4]), group(7, [5, 6], [7, 8, 9, 10])]


def test_samples_become_rows_in_order_padded_to_the_longest() -> None:
    tokens, lengths = response_batch(GROUPS)
    assert tokens.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 0, 0], [7, 8, 9, 10]]
    assert lengths.tolist() == [3, 1, 2, 4]
    assert tokens.dtype == lengths.dtype == torch.int64


def test_values_become_a_message_per_group_without_padding() -> None:
    values = torch.arange(16, dtype=torch.float32).reshape(4, 4) / 3
    rows = values.double().tolist()
    first, second = split_values(values, GROUPS)
    assert (first.group, second.group) == (4, 7)
    assert np.frombuffer(first.values, "<f8").tolist() == [*rows[0][:3], rows[1][0]]
    assert np.frombuffer(second.values, "<f8").tolist() == [*rows[2][:2], *rows[3]]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 3))
def test_joining_undoes_splitting(lengths: list[list[int]], wider: int) -> None:
    groups = [group(n, *[[1] * length for length in each]) for n, each in enumerate(lengths)]
    tokens, counts = response_batch(groups)
    values = torch.rand(tokens.shape[0], tokens.shape[1] + wider, dtype=torch.float64) + 1
    joined = join_values(split_values(values, groups), groups)
    mask = torch.arange(tokens.shape[1]) < counts[:, None]
    assert torch.equal(joined, torch.where(mask, values[:, : tokens.shape[1]], 0.0))


def test_empty_responses_and_wrong_sizes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="a response has no tokens"):
        response_batch([])
    with pytest.raises(ProtocolError, match="a response has no tokens"):
        response_batch([group(0, [1], [])])
    short = Responses(group=3, lengths=(2, 2), tokens=b"\0" * 12)
    with pytest.raises(ProtocolError, match="tokens of group 3 have the wrong size; got 12 bytes; needed 16"):
        response_batch([short])


def test_values_of_other_groups_or_of_another_count_are_refused() -> None:
    first, second = split_values(torch.rand(4, 4), GROUPS)
    with pytest.raises(ProtocolError, match=r"of other groups; got \[7, 4\]; needed \[4, 7\]"):
        join_values([second, first], GROUPS)
    with pytest.raises(ProtocolError, match="log-probabilities of group 7 have the wrong size"):
        join_values([first, Logprobs(group=7, values=second.values[:-8])], GROUPS)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_worker_computes_with_the_threads_and_the_determinism_of_the_run(deterministic: bool) -> None:
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    spec = ModelSpec(
        path="m", dtype="float32", freeze_vision=False, table_hash="h", never_sampled=(), threads=2,
        deterministic=deterministic,
    )  # fmt: skip
    try:
        prepare_torch(spec)
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (2, deterministic)
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
