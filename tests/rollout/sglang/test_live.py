"""The real SGLang, on the CPU and on a GPU: what it samples from, what it says about it, and how it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollplex.errors import EngineError
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.predict import pool_kv_bytes
from rollplex.protocol.common import Memory
from rollplex_rollout.engine import FinishedGroup, UnitReport
from rollplex_rollout.sglang.leftovers import noted
from rollplex_rollout.sglang.requests import Pictures, Request
from rollplex_rollout.sglang.starting import start
from rollplex_rollout.sglang.streams import Chunk
from support.live_sglang import CONTEXT, KV_TOKENS, VERSION, LiveNode, kernels, listening, processes, unavailable

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore"),  # SGLang's own
    pytest.mark.timeout(600),
]
WORDS, WIDE, PICTURES, FILM, LONG = range(5)
NEEDS_SGLANG = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-")
NOISE = {"float32": 2e-4, "bfloat16": 0.06}
"""Mean difference of log-probabilities of -4.5: what bfloat16 does to text, too."""


class Live:
    """A node with a running engine."""

    def __init__(self, folder: Path, dtype: str, device: Memory) -> None:
        run_dir = folder / "run"
        run_dir.mkdir(mode=0o700)
        self.node = LiveNode(folder / "model", run_dir, dtype, device)
        self.engine: Any = start(self.node.setup)
        self.groups: list[FinishedGroup] = []
        self.report: UnitReport | None = None

    def generate(self, groups: Sequence[int], **changes: Any) -> dict[int, FinishedGroup]:
        self.groups = []
        self.report = self.engine.generate(self.node.unit(groups, **changes), self.groups.append)
        return {group.group: group for group in self.groups}

    def difference(self, group: FinishedGroup, temperature: float = 1.0) -> float:
        """Mean, from what the trainer's split computation gives with the weights as they are now."""
        return float(np.abs(self.node.trainer_logprobs(group, temperature) - group.logprobs).mean())


KINDS = [
    pytest.param(("float32", Memory.HOST), id="float32", marks=NEEDS_SGLANG),
    pytest.param(("bfloat16", Memory.HOST), id="bfloat16", marks=NEEDS_SGLANG),
    pytest.param(("bfloat16", Memory.CUDA), id="cuda", marks=[NEEDS_SGLANG, pytest.mark.gpu]),
]


@pytest.fixture(scope="module", params=KINDS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    dtype, device = request.param
    with kernels(device):
        made = Live(tmp_path_factory.mktemp("s"), dtype, device)
        shared = [noted(folder) for folder in made.node.run_dir.iterdir()]
        yield made
        made.engine.close()
    assert [path for path in shared if path is None or path.exists()] == [], "nor is anything elsewhere"
    assert list(made.node.run_dir.iterdir()) == [], "no socket is left in the run directory"
    assert processes() == []
    made.node.segments.close()


def test_every_parameter_lies_in_the_segment_and_both_sides_read_the_same_weights(live: Live) -> None:
    live.engine.check_mapped()
    assert live.engine.digest() == digest(live.node.actor, live.node.table)
    page = HeaderPage(live.engine.actor, run_id=live.node.segments.run_id, table_hash=live.node.table.hash)
    assert page.require(VERSION).digest == live.engine.digest()


def test_its_sockets_are_in_a_folder_of_the_run_that_is_closed_to_others(live: Live) -> None:
    (folder,) = live.node.run_dir.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sum(1 for path in folder.iterdir() if path.is_socket()) >= 3
    file = noted(folder)
    assert file is not None, "which tells of what lies elsewhere"
    assert file.exists()


def test_nothing_of_it_listens_where_another_machine_could_reach_it(live: Live) -> None:
    assert listening(processes()) <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("groups", [(WORDS,), (WIDE,), (PICTURES,), (FILM,), (WORDS, WIDE, PICTURES, FILM, LONG)])
def test_log_probabilities_are_the_trainers(live: Live, groups: tuple[int, ...]) -> None:
    for group in live.generate(groups).values():
        assert live.difference(group) < NOISE[live.node.dtype]
        assert group.lengths == (24,) * 4
        assert not set(group.tokens.tolist()) & set(live.node.never_sampled)


def test_a_prompt_is_prefilled_once_for_its_group_with_its_pictures(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: Any = live.engine._runtime.stream
    cached: dict[str, int] = {}

    async def watched(request: Request, pictures: Pictures | None) -> AsyncIterator[Chunk]:
        async for chunk in stream(request, pictures):
            cached[request.rid[-13:]] = chunk["meta_info"]["cached_tokens"]
            yield chunk

    monkeypatch.setattr(live.engine._runtime, "stream", watched)
    live.generate((PICTURES, LONG), group_size=3)
    for index, group in enumerate((PICTURES, LONG)):
        tokens = live.node.slots[group].tokens
        assert cached[f"{index:06d}-000000"] == 0, "nothing is left of earlier units"
        assert [cached[f"{index:06d}-00000{sample}"] for sample in (1, 2)] == [tokens - 1] * 2


def test_the_schedulers_process_maps_a_units_inputs_as_long_as_it_lasts(live: Live) -> None:
    name = "memfd:test-inputs"
    maps = [Path(f"/proc/{pid}/maps") for pid in processes("sglang::scheduler")]
    found: list[bool] = []
    live.engine.generate(live.node.unit((PICTURES,)), lambda _: found.extend(name in file.read_text() for file in maps))
    assert found == [True]
    assert [name in file.read_text() for file in maps] == [False]


def test_log_probabilities_are_divided_by_the_temperature_and_look_past_top_k(live: Live) -> None:
    for group in live.generate((WORDS, WIDE), temperature=0.6, top_k=5, top_p=0.9).values():
        assert live.difference(group, 0.6) < NOISE[live.node.dtype] / 0.6


def test_greedy_responses_are_alike_with_log_probabilities_of_temperature_1(live: Live) -> None:
    group = live.generate((PICTURES,), temperature=0.0)[PICTURES]
    assert live.difference(group) < NOISE[live.node.dtype]
    if live.node.dtype == "float32":
        samples = np.split(group.tokens, 4)
        assert all((sample == samples[0]).all() for sample in samples)


def test_a_unit_that_is_sampled_again_draws_again_and_others_draw_otherwise(live: Live) -> None:
    def tokens(**changes: Any) -> list[int]:
        return [int(token) for token in live.generate((WORDS,), group_size=2, **changes)[WORDS].tokens]

    assert tokens(seed=1) != tokens(seed=2)
    first = live.generate((WORDS,))[WORDS]
    assert len({tuple(sample) for sample in np.split(first.tokens, 4)}) == 4, "samples of a group differ"


def test_forced_lengths_are_exact_and_groups_come_as_they_end(live: Live) -> None:
    lengths = [40] * 20
    lengths[4 * LONG : 4 * LONG + 4] = [2, 1, 3, 2]
    live.generate((WORDS, WIDE, LONG), max_new_tokens=40, forced_lengths=tuple(lengths), stop_ids=tuple(range(100)))
    assert live.groups[0].group == LONG
    assert live.groups[0].lengths == (2, 1, 3, 2)
    assert all(group.lengths == (40,) * 4 for group in live.groups[1:])
    assert live.report is not None
    assert live.report.decode_steps == 39
    assert live.report.vision_prompts == 1
    assert live.report.kv_bytes == pool_kv_bytes(live.node.shape, kv_tokens=KV_TOKENS, dtype=live.node.dtype)


def test_only_the_units_stop_ids_end_a_response_and_stay_in_it(live: Live) -> None:
    stop = tuple(range(100, 160))
    group = live.generate((LONG,), group_size=8, max_new_tokens=60, stop_ids=stop)[LONG]
    samples = np.split(group.tokens, np.cumsum(group.lengths)[:-1])
    assert any(group.stopped)
    for sample, stopped, length in zip(samples, group.stopped, group.lengths, strict=True):
        assert not set(sample[:-1].tolist()) & set(stop)
        assert stopped == (int(sample[-1]) in stop)
        assert stopped or length == 60


def test_end_of_turn_is_an_ordinary_id_unless_the_unit_names_it(live: Live) -> None:
    eos = live.node.shape.eos_ids[0]
    others = [id_ for id_ in range(live.node.shape.vocab) if id_ not in (eos, *live.node.never_sampled)]
    unit = {"group_size": 8, "max_new_tokens": 200, "stop_ids": tuple(others[:2])}
    group = live.generate((WORDS,), **unit)[WORDS]
    samples = np.split(group.tokens, np.cumsum(group.lengths)[:-1])
    assert any(eos in sample[:-1].tolist() for sample in samples), "drawn, and gone on after"


def test_a_write_into_the_segment_changes_the_next_tokens_and_nothing_is_copied(live: Live) -> None:
    before = live.generate((WIDE,), temperature=0.0)[WIDE]
    head, gate = live.node.parameter("lm_head.weight"), live.node.parameter("visual.merger.mlp.2.weight")
    head.copy_(head.roll(7, 0))
    gate.neg_()
    live.engine.drop_caches()
    live.engine.check_mapped()
    after = live.generate((WIDE,), temperature=0.0)[WIDE]
    assert after.tokens.tolist() != before.tokens.tolist()
    assert live.difference(after) < NOISE[live.node.dtype], "of the new weights, the vision tower's among them"
    assert live.difference(before) > 10 * NOISE[live.node.dtype]
    head.copy_(head.roll(-7, 0))
    gate.neg_()
    again = live.generate((WIDE,), temperature=0.0)[WIDE]
    if live.node.dtype == "float32":
        assert again.tokens.tolist() == before.tokens.tolist()


def test_the_callbacks_error_ends_the_unit_and_the_next_one_runs(live: Live) -> None:
    def announce(_: FinishedGroup) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        live.engine.generate(live.node.unit((WORDS, LONG), max_new_tokens=100), announce)
    assert live.generate((WORDS,))[WORDS].lengths == (24,) * 4


def test_a_response_of_exactly_the_context_is_whole(live: Live) -> None:
    tokens = live.node.slots[WORDS].tokens
    group = live.generate((WORDS,), group_size=1, max_new_tokens=CONTEXT - tokens)[WORDS]
    assert group.lengths == (CONTEXT - tokens,)
    with pytest.raises(EngineError, match="does not hold|longer than"):
        live.engine.kv_bytes(live.node.unit((WORDS,), max_new_tokens=CONTEXT - tokens + 1))


def test_more_responses_than_run_at_once_and_than_the_pool_holds_wait_their_turn(live: Live) -> None:
    groups = live.generate((WORDS, LONG), group_size=24, max_new_tokens=200)
    assert all(group.lengths == (200,) * 24 for group in groups.values())
    assert all(live.difference(group) < NOISE[live.node.dtype] for group in groups.values())


def test_a_scheduler_that_is_killed_ends_the_unit_with_a_name(live: Live) -> None:
    children = processes("sglang::scheduler")
    assert children

    def kill() -> None:
        for pid in children:
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(0.7, kill)
    timer.start()
    with pytest.raises(EngineError, match="SGLang"):
        live.generate((WORDS, LONG), group_size=16, max_new_tokens=400)
    timer.join()
    with pytest.raises(EngineError, match="SGLang"):
        live.engine.check_mapped()
