"""What is done in the scheduler process before a unit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollplex_rollout.sglang.hooks import BUSY
from rollplex_rollout.sglang.scheduler import begin


def scheduler(*, idle: bool) -> Any:
    return SimpleNamespace(
        is_fully_idle=lambda: idle,
        model_config=SimpleNamespace(hf_eos_token_id={2, 3}),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.full((3, 5), 10**9, dtype=torch.int32)),
    )


def test_a_unit_begins_with_its_own_draws_no_eos_and_no_places_from_before() -> None:
    made = scheduler(idle=True)
    state = torch.get_rng_state()
    begin(made, 41)
    first = torch.rand(3)
    begin(made, 41)
    assert torch.equal(torch.rand(3), first)
    torch.set_rng_state(state)
    assert made.model_config.hf_eos_token_id is None
    assert not made.req_to_token_pool.req_to_token.any()


def test_it_does_not_begin_while_requests_run() -> None:
    made = scheduler(idle=False)
    with pytest.raises(RuntimeError, match=BUSY):
        begin(made, 41)
    assert made.model_config.hf_eos_token_id == {2, 3}
