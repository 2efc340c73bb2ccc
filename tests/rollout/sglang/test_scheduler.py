"""What is done in the scheduler process before a unit."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollplex_rollout.sglang.hooks import BUSY, PLACE
from rollplex_rollout.sglang.pixels import Place
from rollplex_rollout.sglang.scheduler import agreed, begin, rest, with_pictures
from rollplex_rollout.sglang.tower import PIXELS


def scheduler(*, idle: bool) -> Any:
    return SimpleNamespace(
        is_fully_idle=lambda: idle,
        ps=SimpleNamespace(tp_size=1),
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


def test_at_rest_a_gpus_memory_and_pinned_memory_are_given_back_when_nothing_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def noted(name: str) -> Any:
        def call() -> bool:
            done.append(name)
            return True

        return call

    encoded = SimpleNamespace(embedding_cache=SimpleNamespace(clear=noted("encoded")))
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setitem(sys.modules, "sglang.srt", ModuleType("sglang.srt"))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", SimpleNamespace(mm_utils=encoded))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", noted("copies are over"))
    monkeypatch.setattr(torch.cuda, "empty_cache", noted("device"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", noted("pinned"), raising=False)  # of torch for GPUs
    model = SimpleNamespace(**{PIXELS: SimpleNamespace(close=noted("pixels"))})
    made = scheduler(idle=True)
    made.flush_cache = noted("keys and values")
    made.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    rest(made)
    assert done == ["copies are over", "keys and values", "pixels", "encoded", "device", "pinned"]


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["", "no room"], "rank 1: no room"),
        (["", "é" * 900], f"rank 1: {'é' * 500}$"),
        ([BUSY, BUSY], f"^{BUSY}$"),
        (["first", "second"], "rank 0: first"),
    ],
)
def test_a_call_that_fails_on_one_rank_fails_on_all(
    monkeypatch: pytest.MonkeyPatch, reasons: list[str], said: str
) -> None:
    def gathered(into: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        assert group == "gloo"
        for part, reason in zip(into, reasons, strict=True):
            words = list(reason.encode()[: part.numel()])
            part.zero_()
            part[: len(words)] = torch.tensor(words, dtype=torch.uint8)
        assert torch.equal(into[0], own)

    monkeypatch.setattr(dist, "all_gather", gathered)
    made = SimpleNamespace(ps=SimpleNamespace(tp_size=2), tp_cpu_group="gloo")

    @agreed
    def call(_: Any, seed: int) -> None:
        assert seed == 4
        if reasons[0]:
            raise RuntimeError(reasons[0])

    with pytest.raises(RuntimeError, match=said):
        call(made, seed=4)
    reasons[:] = ["", ""]
    call(made, seed=4)


class Expected:
    """In place of the scheduler process's pixels."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def expect(self, place: Place) -> None:
        self.places.append(place)


def pictured() -> Any:
    """A scheduler whose model takes pictures."""
    model = SimpleNamespace(**{PIXELS: Expected()})
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))


def arrive(made: Any, rid: str, pictures: Any = None) -> Any:
    """What SGLang's own method is given."""
    seen: list[Any] = []
    with_pictures(
        lambda _self, request: seen.append(request.mm_inputs), made, SimpleNamespace(rid=rid, mm_inputs=pictures)
    )
    return seen[0]


def test_the_pictures_of_a_prompts_first_request_are_those_of_the_others_too() -> None:
    made = pictured()
    items = [
        SimpleNamespace(offsets=[(1, 2)], model_specific_data={PLACE: place})
        for place in ((64, 8, False), (128, 4, True))
    ]
    first = arrive(made, "u1p-000004-000000", SimpleNamespace(mm_items=items, mrope_positions="positions"))
    first.mm_items[0].offsets = []
    first.mm_items.pop()
    for sample in (1, 2):
        given = arrive(made, f"u1p-000004-00000{sample}")
        assert given.mrope_positions == "positions"
        assert [item.offsets for item in given.mm_items] == [[(1, 2)]] * 2
        assert given.mm_items[0].model_specific_data[PLACE] == (64, 8, False)
        given.mm_items[0].offsets = []
    expected = getattr(made.tp_worker.model_runner.model, PIXELS).places
    assert expected == [Place(64, 8, video=False), Place(128, 4, video=True)], (
        "once, in the order in which the tower will want them"
    )


def test_a_prompt_without_pictures_gets_none_and_one_whose_pictures_are_missing_is_refused() -> None:
    made = pictured()
    assert arrive(made, "u1-000004-000001") is None
    with pytest.raises(RuntimeError, match="u1p-000005-000001 came before the one that brings its pictures"):
        arrive(made, "u1p-000005-000001")
