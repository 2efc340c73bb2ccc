"""Responses between bytes and padded tensors."""

from __future__ import annotations

import pytest
import torch

from rollplex.errors import ProtocolError
from rollplex.model.responses import join_values, response_batch, split_values
from rollplex.protocol.common import Responses


def group(number: int, *samples: list[int]) -> Responses:
    flat = torch.tensor([token for sample in samples for token in sample], dtype=torch.int32)
    return Responses(group=number, lengths=tuple(map(len, samples)), tokens=flat.numpy().tobytes())


GROUPS = [group(4, [1, 2, 3], [7]), group(9, [5, 6])]


def test_samples_become_rows_padded_to_the_longest() -> None:
    tokens, lengths = response_batch(GROUPS)
    assert tokens.dtype == lengths.dtype == torch.int64
    assert tokens.tolist() == [[1, 2, 3], [7, 0, 0], [5, 6, 0]]
    assert lengths.tolist() == [3, 1, 2]


def test_values_survive_the_wire_without_their_padding() -> None:
    values = torch.tensor([[0.1, 0.2, 0.3], [0.4, 9.0, 9.0], [0.5, 0.6, 9.0]])
    sent = split_values(values, GROUPS)
    assert [(item.group, len(item.values)) for item in sent] == [(4, 4 * 8), (9, 2 * 8)]
    back = join_values(sent, GROUPS)
    assert back.dtype == torch.float64
    assert torch.equal(back, values.double() * torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]))


@pytest.mark.parametrize(
    "bad", [[], [group(1, [1], [])], [Responses(group=1, lengths=(2,), tokens=b"\0\0\0\0")]], ids=str
)
def test_empty_and_short_responses_are_refused(bad: list[Responses]) -> None:
    with pytest.raises(ProtocolError, match=r"no tokens|wrong size"):
        response_batch(bad)


def test_values_of_other_groups_are_refused() -> None:
    sent = split_values(torch.zeros(3, 3), GROUPS)
    with pytest.raises(ProtocolError, match="other groups"):
        join_values(sent[::-1], GROUPS)
