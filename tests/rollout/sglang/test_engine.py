"""The contract over a scripted SGLang: order, deadlines, what is given back, and how it fails."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollplex.errors import EngineError, SegmentError
from rollplex.memory.predict import pool_kv_bytes
from rollplex.protocol.common import Memory
from rollplex.protocol.rollout import EngineSpec
from rollplex_rollout.engine import FinishedGroup, Setup, Unit, UnitReport
from rollplex_rollout.sglang import engine as engine_module
from rollplex_rollout.sglang.engine import SglangEngine, unit_seed
from rollplex_rollout.sglang.requests import Request, Requests
from rollplex_rollout.sglang.starting import require_offsets, require_sizes
from rollplex_rollout.sglang.streams import Chunk
from support.scripted_sglang import SPEC, ScriptedRemote, ScriptedSglang, chunk, silent, whole

if TYPE_CHECKING:
    from rollout.conftest import Node


class Bench:
    def __init__(self, node: Node, *, gpu: bool = False, spec: EngineSpec = SPEC) -> None:
        self.node = node
        self.sglang = ScriptedSglang()
        self.remote = ScriptedRemote()
        made = node.setup
        device = Memory.CUDA if gpu else Memory.HOST
        self.setup = Setup(
            spec=replace(made.spec, device=device),
            shape=made.shape,
            table=made.table,
            weights=made.weights,
            engine=spec,
            run_dir=None,
        )
        self.engine = SglangEngine(self.setup, self.sglang, self.remote, node.segments.map_again(node.actor_ref))
        self.groups: list[FinishedGroup] = []

    def generate(self, unit: Unit | None = None) -> UnitReport:
        return self.engine.generate(unit or self.node.unit((0, 1, 2), group_size=2), self.groups.append)


@pytest.fixture
def make(shared_node: Node) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(**changes: Any) -> Bench:
        made.append(Bench(shared_node, **changes))
        return made[-1]

    yield build
    for bench in made:
        bench.sglang.stop()


def test_a_unit_from_the_first_request_to_the_report(make: Callable[..., Bench]) -> None:
    bench = make()
    report = bench.generate()
    assert [group.group for group in bench.groups] == [0, 1, 2]
    group = bench.groups[0]
    assert group.lengths == (8, 8)
    assert group.tokens.tolist() == ([1] + [2] * 7) * 2
    assert group.logprobs[:2].tolist() == [-1.0, -1.5]
    assert group.stopped == (False, False)
    assert group.tokens.dtype == np.int32
    assert group.logprobs.dtype == np.float64
    assert report.decode_steps == 7
    assert report.vision_prompts == 2
    assert report.start_s <= report.prefill_end_s <= report.end_s
    assert report.kv_bytes == pool_kv_bytes(bench.setup.shape, kv_tokens=200, dtype="float32")


def test_the_rest_of_a_group_is_asked_for_only_after_its_first_token(make: Callable[..., Bench]) -> None:
    begun: list[str] = []
    bench: Bench

    async def script(request: Request) -> AsyncIterator[Chunk]:
        assert request.rid[-6:] == "000000" or request.rid[-13:-7] in begun
        for part in whole(request):
            await asyncio.sleep(0.02)
            begun.append(request.rid[-13:-7])
            yield part

    bench = make()
    bench.sglang.script = script
    bench.generate(bench.node.unit((0, 1), group_size=3))
    sent = [line.removeprefix("send ") for line in bench.sglang.story if line.startswith("send")]
    assert sorted(sent) == [f"{prompt:06d}-{sample:06d}" for prompt in range(2) for sample in range(3)]
    assert [name for name in sent if name.endswith("-000000")] == ["000000-000000", "000001-000000"]


def test_nothing_reads_a_units_pictures_when_its_end_is_told(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segment is unmapped next."""
    reading, ended = threading.Event(), threading.Event()

    async def script(request: Request) -> AsyncIterator[Chunk]:
        await asyncio.to_thread(reading.wait, 10.0)
        if request.rid:
            raise EngineError("of the first prompt, while the second one's pictures are read")
        yield {}

    def read(_self: Requests, *_: object) -> None:
        reading.set()
        ended.wait(0.3)
        ended.set()

    monkeypatch.setattr(Requests, "_medium", read)
    bench = make()
    bench.sglang.script = script
    with pytest.raises(EngineError, match="of the first prompt"):
        bench.generate(bench.node.unit((1, 0), group_size=2))
    assert ended.is_set()


def test_a_unit_that_cannot_begin_gives_its_memory_back_too(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(gpu=True)
    bench.sglang.story.clear()

    def refuse(method: str, **_: object) -> None:
        bench.sglang.story.append(method)
        if method == "rollplex_begin":
            raise EngineError("SGLang refused a call", got="not idle")

    monkeypatch.setattr(bench.sglang, "rpc", refuse)
    with pytest.raises(EngineError, match="not idle"):
        bench.generate()
    assert bench.sglang.story == ["resume", "rollplex_begin", "abort all", "rollplex_rest", "release"]


def test_the_units_inputs_are_lent_to_sglangs_process_before_any_request_if_there_are_pictures(
    make: Callable[..., Bench],
) -> None:
    bench = make()
    unit = bench.node.unit((0, 1), group_size=1)
    story: list[str] = []

    async def script(request: Request) -> AsyncIterator[Chunk]:
        story.append(f"lent {len(bench.remote.lent)}")
        for part in whole(request):
            yield part

    bench.sglang.script = script
    bench.generate(unit)
    assert bench.remote.lent == [(unit.inputs_fd, bench.node.inputs.size_bytes)]
    assert story == ["lent 1"] * 2
    bench.generate(bench.node.unit((1,), group_size=1))
    assert len(bench.remote.lent) == 1, "words alone need none"
    with pytest.raises(EngineError, match="cannot read a unit's pictures"):
        bench.generate(dataclasses.replace(unit, inputs_fd=None))


def test_between_units_a_gpu_has_its_memory_back(make: Callable[..., Bench]) -> None:
    bench = make(gpu=True)
    assert bench.sglang.story == ["rollplex_rest", "release"], "the pool that it came up with"
    bench.sglang.story.clear()
    bench.generate(bench.node.unit((1,), group_size=1))
    assert bench.sglang.story == ["resume", "rollplex_begin", "send 000000-000000", "rollplex_rest", "release"]
    bench.sglang.story.clear()
    bench.engine.drop_caches()
    assert bench.sglang.story == ["rollplex_rest"]


def test_a_group_is_announced_while_others_are_still_decoded(make: Callable[..., Bench]) -> None:
    bench = make()
    seen, release = threading.Event(), threading.Event()

    async def script(request: Request) -> AsyncIterator[Chunk]:
        first, last = whole(request)
        yield first
        if request.rid.endswith("000001-000000"):
            await asyncio.to_thread(seen.wait, 10)
        yield last

    def announce(group: FinishedGroup) -> None:
        bench.groups.append(group)
        assert threading.current_thread() is threading.main_thread()
        seen.set()

    bench.sglang.script = script
    bench.engine.generate(bench.node.unit((0, 1), group_size=1), announce)
    assert [group.group for group in bench.groups] == [0, 1]
    assert not release.is_set()


def test_groups_that_are_seen_to_end_together_come_in_the_order_of_their_prompts(make: Callable[..., Bench]) -> None:
    bench = make()
    unit = bench.node.unit((2, 0, 1), group_size=1)
    blocked = threading.Event()

    async def script(request: Request) -> AsyncIterator[Chunk]:
        first, last = whole(request)
        yield first
        await asyncio.sleep({"000000": 0.2, "000001": 0.1, "000002": 0.0}[request.rid[-13:-7]])
        yield last

    def announce(group: FinishedGroup) -> None:
        bench.groups.append(group)
        if len(bench.groups) == 1:
            blocked.wait(0.6)

    bench.sglang.script = script
    bench.engine.generate(unit, announce)
    assert [group.group for group in bench.groups] == [1, 2, 0]


def test_an_error_of_the_callback_ends_the_unit_and_comes_out_unchanged(make: Callable[..., Bench]) -> None:
    bench = make(gpu=True)
    error = LookupError("stop here")

    def announce(_: FinishedGroup) -> None:
        raise error

    bench.sglang.story.clear()
    with pytest.raises(LookupError) as caught:
        bench.engine.generate(bench.node.unit((0, 1), group_size=2), announce)
    assert caught.value is error
    assert bench.sglang.story[-3:] == ["abort all", "rollplex_rest", "release"]


BAD_ENDS: dict[str, Chunk] = {
    "another reason": chunk([1, 2], {"type": "abort", "message": "out of memory"}),
    "another reason.*after 2 tokens": chunk([1, 2], {"type": "length"}),
    "another reason.*NaN": chunk([1, 2], {"type": "stop", "matched": "NaN happened"}),
    "other ids": chunk([1], output_token_logprobs=[(-0.5, 9, None)]),
    "not finite": chunk([2] * 8, {"type": "length"}, output_token_logprobs=[(float("nan"), 2, None)] * 8),
}


@pytest.mark.parametrize("what", BAD_ENDS)
def test_a_response_that_is_not_what_was_asked_for_is_an_error(make: Callable[..., Bench], what: str) -> None:
    bench = make()

    async def script(_: Request) -> AsyncIterator[Chunk]:
        yield BAD_ENDS[what]

    bench.sglang.script = script
    with pytest.raises(EngineError, match=what):
        bench.generate()
    assert bench.groups == []
    assert "abort all" in bench.sglang.story


def test_a_stop_id_ends_a_response_only_if_it_is_one_of_the_units(make: Callable[..., Bench]) -> None:
    bench = make()

    async def script(_: Request) -> AsyncIterator[Chunk]:
        yield chunk([1, 5], {"type": "stop", "matched": 5})

    bench.sglang.script = script
    bench.generate(bench.node.unit((1,), group_size=1, stop_ids=(5, 6)))
    assert bench.groups[0].stopped == (True,)
    assert bench.groups[0].lengths == (2,)
    with pytest.raises(EngineError, match="another reason"):
        bench.generate(bench.node.unit((1,), group_size=1, stop_ids=(6,)))


def test_what_sglang_raises_is_an_engine_error_with_its_cause(make: Callable[..., Bench]) -> None:
    bench = make()

    async def script(_: Request) -> AsyncIterator[Chunk]:
        yield chunk([1])
        raise ValueError("too long for this server")

    bench.sglang.script = script
    with pytest.raises(EngineError, match="too long for this server") as caught:
        bench.generate()
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_request_without_progress_is_named_after_the_deadline(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "STALL_S", 0.1)
    monkeypatch.setattr(engine_module, "_LOOK_EVERY_S", 0.05)
    bench = make()
    bench.sglang.script = silent
    with pytest.raises(EngineError, match="no token for too long") as caught:
        bench.generate()
    assert re.search(r"-00000\d-00000\d$", caught.value.where)
    assert "abort all" in bench.sglang.story


def test_a_process_of_sglang_that_dies_ends_the_unit(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_LOOK_EVERY_S", 0.05)
    bench = make()

    def script(request: Request) -> AsyncIterator[Chunk]:
        bench.sglang.dead = "its process 77 has ended"
        return silent(request)

    bench.sglang.script = script
    with pytest.raises(EngineError, match="process 77") as caught:
        bench.generate()
    assert any("could not be brought to rest" in note for note in caught.value.__notes__)
    assert "abort all" not in bench.sglang.story, "there is nobody to ask"


def test_a_unit_whose_longest_request_does_not_fit_is_refused_before_it_is_leased(make: Callable[..., Bench]) -> None:
    bench = make(spec=replace(SPEC, kv_tokens=120, context_tokens=112))
    unit = bench.node.unit((0, 1), max_new_tokens=105)
    with pytest.raises(EngineError, match="does not hold a prompt"):
        bench.engine.kv_bytes(unit)
    assert bench.engine.kv_bytes(bench.node.unit((0, 1))) == pool_kv_bytes(
        bench.setup.shape, kv_tokens=120, dtype="float32"
    )


def test_the_weights_are_asked_about_where_they_are_mapped(make: Callable[..., Bench]) -> None:
    bench = make()
    assert bench.engine.digest() == "d" * 64
    assert bench.engine.on_policy
    with pytest.raises(SegmentError):
        bench.engine.check_mapped()


def test_an_engine_with_weights_of_its_own_copies_the_new_ones_after_a_commit(make: Callable[..., Bench]) -> None:
    mapped, own = make(), make(spec=replace(SPEC, own_weights=True))
    for bench in (mapped, own):
        bench.engine.drop_caches()
    assert (mapped.remote.copies, own.remote.copies) == (0, 1)


def test_close_ends_everything(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.engine.close()
    assert bench.sglang.story[-1] == "close"
    assert bench.remote.closed
    assert bench.engine.actor.closed


def test_draws_depend_on_the_unit_and_on_nothing_else(shared_node: Node) -> None:
    units = [
        shared_node.unit((0,)),
        shared_node.unit((1,)),
        shared_node.unit((0,), step=3),
        shared_node.unit((0,), purpose="eval:a"),
        shared_node.unit((0,), seed=4),
    ]
    seeds = [unit_seed(unit) for unit in units]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert unit_seed(shared_node.unit((0,))) == seeds[0]


def test_parameters_that_lie_elsewhere_and_another_pool_are_refused(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    setup = make(gpu=True).setup
    right = {entry.name: entry.offset for entry in setup.table.entries}
    require_offsets(setup, right)
    name = setup.table.entries[2].name
    with pytest.raises(EngineError, match=name):
        require_offsets(setup, {**right, name: 0})
    with pytest.raises(EngineError, match="1 elsewhere, such as other"):
        require_offsets(setup, {**right, "other": 0})
    require_sizes(setup, {"max_total_num_tokens": 200, "memory_usage": {"weight": 0.0}})
    with pytest.raises(EngineError, match="another pool"):
        require_sizes(setup, {"max_total_num_tokens": 199, "memory_usage": {"weight": 0.0}})
    assert [record for record in caplog.records if record.name.startswith("rollplex")] == []
    require_sizes(setup, {"max_total_num_tokens": 200, "memory_usage": {"weight": 6.5}})
    assert "6.50 GB" in caplog.text
