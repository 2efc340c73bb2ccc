"""The line between the ranks of one engine: two ends in two threads, over the real collective; an engine that leads a
scripted SGLang and one that follows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from rollplex.errors import EngineError, ProtocolError, WaitError
from rollplex.memory.predict import pool_kv_bytes
from rollplex.model.parallel.group import TensorGroup
from rollplex.protocol.common import Memory, Parallel
from rollplex_rollout.engine import FinishedGroup, Setup, UnitReport
from rollplex_rollout.sglang import ranks
from rollplex_rollout.sglang.engine import SglangEngine
from rollplex_rollout.sglang.following import FollowingEngine
from rollplex_rollout.sglang.ranks import Rounds, finished, sampled
from support.scripted_sglang import SPEC, ScriptedRemote, ScriptedSglang, silent

if TYPE_CHECKING:
    from rollout.conftest import Node

GROUP = FinishedGroup(
    group=3,
    lengths=(2, 1),
    tokens=np.asarray([5, 6, 7], np.int32),
    logprobs=np.asarray([-0.1, float(np.nextafter(-0.2, 0)), -0.0]),
    stopped=(False, True),
)


def well() -> None:
    """This rank's SGLang lives."""


class Ends:
    """Both ends; each step is a call in a thread of its own."""

    def __init__(self, folder: Path, deadline_s: float = 30.0) -> None:
        self.looks: list[Callable[[], None]] = [well, well]
        self.pool = ThreadPoolExecutor(2)
        store = str(folder / "meet")
        self.rounds = [each.result(30) for each in [self.pool.submit(self._end, store, n, deadline_s) for n in (0, 1)]]

    def _end(self, store: str, number: int, deadline_s: float) -> Rounds:
        file: Any = dist.FileStore(store, 2)  # type: ignore[attr-defined]
        gloo: Any = dist.ProcessGroupGloo(file, number, 2, timedelta(seconds=60))
        return Rounds(TensorGroup(rank=number, size=2, process_group=gloo), lambda: self._look(number), deadline_s)

    def join(self, number: int, size: int) -> None:
        """Come to the collective that the other end has given up, which would keep its thread until gloo's deadline."""
        group: Any = self.rounds[number]._group.process_group
        parts = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        group.allgather([parts], [torch.zeros(size, dtype=torch.uint8)]).wait()

    def _look(self, number: int) -> None:
        self.looks[number]()

    def both(self, leads: Callable[[Rounds], Any], follows: Callable[[Rounds], Any]) -> tuple[Future[Any], Future[Any]]:
        return self.pool.submit(leads, self.rounds[0]), self.pool.submit(follows, self.rounds[1])


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = Ends(tmp_path)
    yield made
    made.pool.shutdown()


def fails(rounds: Rounds, error: BaseException) -> None:
    with rounds.failing():
        raise error


def test_what_rank_0_tells_is_heard_in_the_same_bits_and_order(ends: Ends) -> None:
    said, heard = ends.both(lambda a: a.tell(ranks.Prefilled(), sampled(GROUP)), lambda b: b.hear())
    said.result(10)
    first, second = heard.result(10)
    assert first == ranks.Prefilled()
    back = finished(second)
    assert (back.group, back.lengths, back.stopped) == (3, (2, 1), (False, True))
    assert back.tokens.tobytes() == GROUP.tokens.tobytes()
    assert back.logprobs.tobytes() == GROUP.logprobs.tobytes()
    said, heard = ends.both(lambda a: a.tell(), lambda b: b.hear())
    said.result(10)
    assert heard.result(10) == (), "it goes on"


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_fails_says_why_and_the_line_is_over(ends: Ends, failed: int) -> None:
    acts: list[Callable[[Rounds], Any]] = [lambda a: a.tell(), lambda b: b.hear()]
    acts[failed] = lambda end: fails(end, LookupError("no such thing"))
    results = ends.both(*acts)
    with pytest.raises(WaitError, match=f"rank {failed}: Another rank.*LookupError: no such thing"):
        results[1 - failed].result(10)
    with pytest.raises(LookupError):
        results[failed].result(10)
    for rounds in ends.rounds:
        with pytest.raises(EngineError, match="are apart"):
            rounds.tell()


def test_a_rank_whose_sglang_dies_while_it_waits_tells_the_other(ends: Ends) -> None:
    """It waits for a round that the other is not at yet, looks, and fails in the one after."""

    def dead() -> None:
        raise EngineError("SGLang has failed", got="its process 77 has ended")

    ends.looks[1] = dead

    def lead(rounds: Rounds) -> None:
        time.sleep(0.5)
        rounds.tell(sampled(GROUP))
        rounds.tell()

    def follow(rounds: Rounds) -> None:
        with rounds.failing():
            rounds.hear()

    said, heard = ends.both(lead, follow)
    with pytest.raises(WaitError, match="Another rank.*process 77"):
        said.result(10)
    with pytest.raises(EngineError, match=r"^SGLang has failed.*process 77"):
        heard.result(10)


def test_a_rank_that_does_not_come_is_waited_for_until_a_deadline(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENT_S", 0.3)
    with pytest.raises(WaitError, match="did not come"):
        ends.rounds[1].hear()
    with pytest.raises(EngineError, match="are apart"):
        ends.rounds[1].hear()
    ends.rounds[0].tell()  # see `join`


def test_a_rank_that_may_be_late_is_waited_for_longer(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENT_S", 0.1)

    def lead(rounds: Rounds) -> None:
        time.sleep(0.6)
        rounds.tell(ranks.Up())

    said, heard = ends.both(lead, lambda b: b.hear(late=True))
    said.result(10)
    ranks.expect(heard.result(10), ranks.Up)


def test_a_failure_that_nobody_comes_to_hear_of_takes_no_longer_than_its_deadline(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "FAILING_S", 0.2)
    start = time.monotonic()
    with pytest.raises(LookupError):
        fails(ends.rounds[0], LookupError("alone"))
    assert time.monotonic() - start < 5
    with pytest.raises(WaitError, match="rank 0: Another rank.*did not stay to tell"):
        ends.rounds[1].hear()
    ends.join(0, len("LookupError: alone"))


def test_ranks_at_different_instructions_are_told_so() -> None:
    with pytest.raises(ProtocolError, match="got Up.*needed Dropped"):
        ranks.expect([ranks.Up()], ranks.Dropped)
    with pytest.raises(ProtocolError, match="got nothing"):
        ranks.expect([], ranks.Dropped)


class Pair:
    """Rank 0 over a scripted SGLang, and rank 1."""

    def __init__(self, node: Node, ends: Ends, *, gpu: bool = False, own: bool = False) -> None:
        self.node, self.ends = node, ends
        self.sglang, self.remotes = ScriptedSglang(), [ScriptedRemote(), ScriptedRemote()]
        ends.looks[0] = self.sglang.require_alive
        self.follower = Quiet()
        ends.looks[1] = self.follower.require_alive
        made = node.setup
        self.setups = [
            Setup(
                spec=replace(made.spec, device=Memory.CUDA if gpu else Memory.HOST),
                shape=made.shape,
                table=made.table,
                weights=made.weights,
                engine=replace(SPEC, own_weights=own),
                run_dir=None,
                parallel=Parallel(training=2, rollout=2, rank=rank, device=rank, meet="unused"),
            )
            for rank in (0, 1)
        ]
        actors = [node.segments.map_again(node.actor_ref) for _ in range(2)]
        lead, follow = ends.both(
            lambda line: SglangEngine(self.setups[0], self.sglang, self.remotes[0], actors[0], line),
            lambda line: FollowingEngine(self.setups[1], self.follower, self.remotes[1], actors[1], line),
        )
        self.engines: list[Any] = [lead.result(20), follow.result(20)]
        self.announced: list[list[FinishedGroup]] = [[], []]
        self.prefilled = [0, 0]

    def generate(self, *units: Any) -> list[Future[UnitReport]]:
        given = units or (self.node.unit((0, 1, 2), group_size=2),) * 2
        return [
            self.ends.pool.submit(engine.generate, unit, self.announced[n].append, lambda n=n: self._mark(n))
            for n, (engine, unit) in enumerate(zip(self.engines, given, strict=True))
        ]

    def _mark(self, number: int) -> None:
        self.prefilled[number] += 1

    def drop(self) -> None:
        for each in [self.ends.pool.submit(engine.drop_caches) for engine in self.engines]:
            each.result(10)


class Quiet:
    """A following rank's part of SGLang."""

    def __init__(self) -> None:
        self.dead = ""
        self.closed = False

    def require_alive(self) -> None:
        if self.dead:
            raise EngineError("SGLang has failed", got=self.dead)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pair(shared_node: Node, ends: Ends) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def build(**changes: Any) -> Pair:
        made.append(Pair(shared_node, ends, **changes))
        return made[-1]

    yield build
    for each in made:
        each.sglang.stop()


def test_both_ranks_announce_the_same_groups_and_report_the_same_unit(pair: Callable[..., Pair]) -> None:
    made = pair()
    reports = [each.result(20) for each in made.generate()]
    ours, theirs = made.announced
    assert [one.group for one in ours] == [one.group for one in theirs] == [0, 1, 2]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.lengths, one.stopped) == (other.lengths, other.stopped)
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
    assert made.prefilled == [1, 1]
    assert reports[0].decode_steps == reports[1].decode_steps == 7
    assert reports[0].vision_prompts == reports[1].vision_prompts == 2
    assert reports[0].prefill_end_s == reports[1].prefill_end_s
    assert [len(remote.lent) for remote in made.remotes] == [1, 1], "each rank's own process reads the pictures"


def test_a_rank_counts_the_keys_and_values_of_its_share_of_the_heads(pair: Callable[..., Pair]) -> None:
    made = pair()
    shape = made.setups[0].shape
    whole = pool_kv_bytes(shape, kv_tokens=SPEC.kv_tokens, dtype="float32")
    assert shape.kv_heads == 1, "which both ranks have"
    unit = made.node.unit((0,))
    assert [engine.kv_bytes(unit) for engine in made.engines] == [whole, whole]


def test_other_ranks_are_at_rest_before_a_unit_is_over(pair: Callable[..., Pair]) -> None:
    made = pair(gpu=True)
    assert made.sglang.story == ["rollplex_rest", "release", "rollplex_together"]
    made.sglang.story.clear()
    unit = made.node.unit((1,), group_size=1)
    for each in made.generate(unit, unit):
        each.result(20)
    assert made.sglang.story[-3:] == ["rollplex_rest", "release", "rollplex_together"]


def test_caches_are_dropped_on_all_ranks_and_each_renews_its_own_weights(pair: Callable[..., Pair]) -> None:
    made = pair(own=True)
    made.drop()
    assert [remote.copies for remote in made.remotes] == [1, 1]


def test_ranks_with_different_units_say_so(pair: Callable[..., Pair]) -> None:
    made = pair()
    lead, follow = made.generate(made.node.unit((0,)), made.node.unit((1,)))
    with pytest.raises(EngineError, match="different units"):
        follow.result(20)
    with pytest.raises(WaitError, match="Another rank.*different units"):
        lead.result(20)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scheduler_process_that_dies_ends_the_unit_on_both_ranks(pair: Callable[..., Pair], rank: int) -> None:
    made = pair()

    def script(request: Any) -> Any:
        if rank:
            made.follower.dead = "its process 78 has ended"
        else:
            made.sglang.dead = "its process 77 has ended"
        return silent(request)

    made.sglang.script = script
    start = time.monotonic()
    results = made.generate()
    with pytest.raises(EngineError, match=r"^SGLang has failed.*process 7"):
        results[rank].result(20)
    with pytest.raises(WaitError, match=f"rank {rank}: Another rank.*process 7"):
        results[1 - rank].result(20)
    assert time.monotonic() - start < 10
    assert "abort all" not in made.sglang.story, "there is nobody to end it with"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_a_ranks_callback_ends_the_unit_on_both(pair: Callable[..., Pair], rank: int) -> None:
    made = pair()

    class Stop(list[Any]):
        def append(self, _: Any) -> None:
            raise LookupError("stop here")

    made.announced[rank] = Stop()
    results = made.generate()
    with pytest.raises(LookupError, match="stop here"):
        results[rank].result(20)
    with pytest.raises(WaitError, match="Another rank.*stop here"):
        results[1 - rank].result(20)


def test_a_following_rank_closes_what_is_its_own(pair: Callable[..., Pair]) -> None:
    made = pair()
    made.engines[1].close()
    assert made.remotes[1].closed
    assert made.follower.closed
    assert made.engines[1].actor.closed
    assert not made.remotes[0].closed
