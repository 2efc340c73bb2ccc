"""Messages in, messages out: versions, leases, turns and digests of the rollout service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from rollplex.errors import BudgetError, EngineError, ModelError, RollplexError, StaleWeightsError, StateError
from rollplex.memory.digest import digest
from rollplex.protocol.codec import CHANNELS
from rollplex.protocol.common import (
    CachesDropped,
    Committed,
    DigestReply,
    DigestRequest,
    Drain,
    Drained,
    Kind,
    LeaseRef,
    Leave,
    Loaded,
    Role,
)
from rollplex.protocol.rollout import (
    FromRollout,
    GenerateUnit,
    GroupFinished,
    LoadRollout,
    Prefilled,
    ToRollout,
    UnitGenerated,
)
from rollplex_rollout.engine import Announce, FinishedGroup, Setup, Unit, UnitReport, nobody
from rollplex_rollout.service import RolloutService
from support.tiny import VOCAB

if TYPE_CHECKING:
    from rollout.conftest import Node

VERSION = 5


class RecordedEngine:
    """Announces one-token groups and writes down what happens; `before` runs before each announcement."""

    on_policy = False

    def __init__(self, setup: Setup, story: list[str], before: Callable[[int], None] = lambda _: None) -> None:
        self.actor = setup.actor
        self._table = setup.table
        self._story = story
        self.before = before

    def digest(self) -> str:
        return digest(self.actor, self._table)

    def kv_bytes(self, unit: Unit) -> int:
        return 100 * len(unit.prompts)

    def generate(self, unit: Unit, announce: Announce, prefilled: Callable[[], None] = nobody) -> UnitReport:
        prefilled()
        for slot in unit.prompts:
            self.before(slot.group)
            self._story.append(f"announce {slot.group}")
            announce(
                FinishedGroup(
                    group=slot.group,
                    lengths=(2, 1),
                    tokens=np.asarray([1, 2, 3], dtype=np.int32),
                    logprobs=np.asarray([-1.0, -2.0, -0.5]),
                    stopped=(True, False),
                )
            )
        return UnitReport(
            start_s=1.0, prefill_end_s=2.0, end_s=3.0, decode_steps=1, vision_prompts=2, kv_bytes=self.kv_bytes(unit)
        )

    def check_mapped(self) -> None:
        self._story.append("check mapped")

    def drop_caches(self) -> None:
        self._story.append("drop caches")

    def close(self) -> None:
        self._story.append("close")


class Bench:
    """A service with recorded replies, over the segments of a node."""

    def __init__(self, node: Node, engine: Callable[[Setup], Any] | None = None) -> None:
        self.node = node
        self.story: list[str] = []
        self.replies: list[FromRollout] = []
        node.segments.before_attach = lambda ref: self.story.append(f"attach {ref.segment}")
        node.segments.before_detach = lambda segment: self.story.append(f"detach {segment}")
        self.service = RolloutService(node.segments, engine)

    def tell(self, message: ToRollout) -> list[FromRollout]:
        """Only what this message was answered; both survive the wire."""
        start = len(self.replies)
        channel = CHANNELS[Role.ROLLOUT]
        self.service.handle(channel.to_worker.decode(channel.to_worker.encode(message)), self._reply)
        return self.replies[start:]

    def _reply(self, message: FromRollout) -> None:
        channel = CHANNELS[Role.ROLLOUT]
        assert channel.from_worker.decode(channel.from_worker.encode(message)) == message
        self.story.append(type(message).__name__)
        self.replies.append(message)

    def load(self, **changes: Any) -> list[FromRollout]:
        spec = msgspec.structs.replace(self.node.spec, **changes)
        return self.tell(LoadRollout(cause=1, model=spec, actor=self.node.actor_ref))

    def generate(self, groups: tuple[int, ...] = (0, 1), **changes: Any) -> list[FromRollout]:
        message = GenerateUnit(
            cause=2,
            step=7,
            version=VERSION,
            unit=3,
            inputs=self.node.inputs_ref,
            prompts=tuple(self.node.slots[group] for group in groups),
            sampling=self.node.sampling(group_size=2),
            kv=LeaseRef(lease=44, kind=Kind.ROLLOUT_KV, size_bytes=10**8),
        )
        return self.tell(msgspec.structs.replace(message, **changes))


@pytest.fixture
def recorded(node: Node) -> Bench:
    """Loaded, with an engine that only records."""
    bench = Bench(node, lambda setup: RecordedEngine(setup, bench.story))
    bench.load()
    bench.tell(DigestRequest(cause=1))  # what happens at the first use only has happened
    bench.story.clear()
    bench.replies.clear()
    return bench


def acting(node: Node, before: Callable[[int], None]) -> Bench:
    bench = Bench(node, lambda setup: RecordedEngine(setup, bench.story, before))
    bench.load()
    return bench


def test_a_unit_of_the_real_engine_from_load_to_the_last_group(node: Node) -> None:
    bench = Bench(node)
    (loaded,) = bench.load()
    assert loaded == Loaded(cause=1, table_bytes=node.table.total_bytes, on_policy=True)
    prefilled, *groups, done = bench.generate((0, 1, 2, 3))
    assert isinstance(done, UnitGenerated)
    assert isinstance(prefilled, Prefilled)
    assert done.prefill_end_s <= prefilled.end_s <= done.end_s
    assert {group.responses.group for group in groups if isinstance(group, GroupFinished)} == {0, 1, 2, 3}
    for group in groups:
        assert isinstance(group, GroupFinished)
        assert (group.cause, group.step, group.version_start, group.version_end) == (2, 7, VERSION, VERSION)
        tokens = np.frombuffer(group.responses.tokens, dtype="<i4")
        logprobs = np.frombuffer(group.logprobs.values, dtype="<f8")
        assert len(tokens) == len(logprobs) == sum(group.responses.lengths)
        assert int(tokens.max()) < VOCAB
        assert float(logprobs.max()) < 0.0
        assert done.start_s <= group.end_s <= done.end_s
    assert (done.unit, done.vision_prompts) == (3, 3)
    assert done.start_s <= done.prefill_end_s <= done.end_s
    (held,) = done.held
    assert held.lease == 44
    assert 0 < held.size_bytes < 10**8
    assert bench.tell(Leave(reason="done")) == []


def test_replies_come_as_groups_finish_and_the_inputs_are_given_back_before_the_unit_is_reported(
    recorded: Bench,
) -> None:
    replies = recorded.generate()
    assert recorded.story == [
        "attach 2", "Prefilled",
        "announce 0", "GroupFinished", "announce 1", "GroupFinished", "detach 2", "UnitGenerated",
    ]  # fmt: skip
    assert isinstance(replies[0], Prefilled)
    assert (replies[0].step, replies[0].unit) == (7, 3)
    first, done = replies[1], replies[-1]
    assert isinstance(first, GroupFinished)
    assert isinstance(done, UnitGenerated)
    assert first.responses.lengths == (2, 1)
    assert first.stopped == (True, False)
    assert np.frombuffer(first.responses.tokens, dtype="<i4").tolist() == [1, 2, 3]
    assert np.frombuffer(first.logprobs.values, dtype="<f8").tolist() == [-1.0, -2.0, -0.5]
    assert (done.start_s, done.prefill_end_s, done.end_s, done.decode_steps, done.vision_prompts) == (1, 2, 3, 1, 2)
    assert [(held.lease, held.size_bytes) for held in done.held] == [(44, 200)]


def test_what_the_engine_says_about_its_policy_is_passed_on(node: Node) -> None:
    bench = Bench(node, lambda setup: RecordedEngine(setup, bench.story))
    (loaded,) = bench.load()
    assert isinstance(loaded, Loaded)
    assert not loaded.on_policy


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_unit_for_another_version_is_refused_before_a_token(recorded: Bench, version: int) -> None:
    with pytest.raises(StaleWeightsError, match=f"got version {VERSION}, STABLE; needed version {version}"):
        recorded.generate(version=version)
    assert recorded.story == ["attach 2"]


def test_weights_in_an_update_or_poisoned_are_refused(recorded: Bench) -> None:
    recorded.node.header.begin_update(VERSION)
    with pytest.raises(StaleWeightsError, match="UPDATING"):
        recorded.generate()
    recorded.node.header.poison()
    with pytest.raises(StaleWeightsError, match="POISONED"):
        recorded.generate()
    assert "GroupFinished" not in recorded.story


def test_an_update_that_begins_while_a_unit_decodes_keeps_its_group_from_going_out(node: Node) -> None:
    bench = acting(node, lambda group: node.header.begin_update(VERSION) if group == 1 else None)
    with pytest.raises(StaleWeightsError, match="UPDATING"):
        bench.generate()
    sent = [reply.responses.group for reply in bench.replies if isinstance(reply, GroupFinished)]
    assert sent == [0]
    assert not any(isinstance(reply, UnitGenerated) for reply in bench.replies)


def test_a_whole_update_while_a_unit_decodes_is_noticed_too(node: Node) -> None:
    def update(group: int) -> None:
        if group == 1:
            node.header.begin_update(VERSION)
            node.header.publish(VERSION + 1, digest(node.actor, node.table))

    with pytest.raises(StaleWeightsError, match=f"version {VERSION + 1}, STABLE"):
        acting(node, update).generate()


def test_a_lease_that_is_too_small_is_refused_before_anything_is_sampled(recorded: Bench) -> None:
    enough = LeaseRef(lease=1, kind=Kind.ROLLOUT_KV, size_bytes=200)
    assert len(recorded.generate(kv=enough)) == 4
    recorded.story.clear()
    with pytest.raises(BudgetError, match=r"step 7, decode unit 3: .*got 199 bytes; needed 200"):
        recorded.generate(kv=msgspec.structs.replace(enough, size_bytes=199))
    assert recorded.story == ["attach 2"]


def test_from_drain_to_committed_nothing_is_sampled(recorded: Bench) -> None:
    assert recorded.tell(Drain(cause=8, version=VERSION)) == [Drained(cause=8, version=VERSION)]
    with pytest.raises(StateError, match="may not be read"):
        recorded.generate()
    recorded.node.header.begin_update(VERSION)
    recorded.node.header.publish(VERSION + 1, digest(recorded.node.actor, recorded.node.table))
    recorded.story.clear()
    answer = recorded.tell(Committed(cause=9, version=VERSION + 1))
    assert answer == [CachesDropped(cause=9, version=VERSION + 1)]
    assert recorded.story == ["drop caches", "CachesDropped"]
    assert len(recorded.generate(version=VERSION + 1)) == 4


def test_a_drain_of_another_version_than_the_headers_is_refused(recorded: Bench) -> None:
    with pytest.raises(StaleWeightsError, match=f"got version {VERSION}, STABLE; needed version {VERSION + 1}"):
        recorded.tell(Drain(cause=8, version=VERSION + 1))


@pytest.mark.parametrize("first", ["unit", "digest"])
def test_what_an_engine_saw_of_the_weights_while_they_were_filled_is_dropped_before_its_first_use(
    node: Node, first: str
) -> None:
    """All workers load at once: an engine that copies the weights may have copied them before the trainer had filled
    them, and would sample from that copy as if it were the version of the header."""
    bench = Bench(node, lambda setup: RecordedEngine(setup, bench.story))
    bench.load()
    bench.story.clear()
    with pytest.raises(StaleWeightsError):
        bench.generate(version=VERSION + 1)
    assert "drop caches" not in bench.story, "the header does not show them filled"
    if first == "unit":
        bench.generate()
        assert bench.story.index("drop caches") < bench.story.index("Prefilled")
    else:
        bench.tell(DigestRequest(cause=20))
        assert bench.story[-3:] == ["drop caches", "check mapped", "DigestReply"]
    bench.generate()
    assert bench.story.count("drop caches") == 1


def test_a_commit_that_the_header_does_not_show_is_refused_and_the_service_stays_drained(recorded: Bench) -> None:
    recorded.tell(Drain(cause=8, version=VERSION))
    with pytest.raises(StaleWeightsError, match=f"needed version {VERSION + 1}"):
        recorded.tell(Committed(cause=9, version=VERSION + 1))
    with pytest.raises(StateError):
        recorded.generate()
    assert recorded.tell(Committed(cause=10, version=VERSION)) == [CachesDropped(cause=10, version=VERSION)]


def test_the_digest_is_of_the_bytes_that_the_trainer_maps(recorded: Bench) -> None:
    node = recorded.node
    (before,) = recorded.tell(DigestRequest(cause=20))
    assert before == DigestReply(cause=20, version=VERSION, digest=digest(node.actor, node.table))
    element = node.parameter("model.norm.weight")[7:8]
    element.copy_(torch.nextafter(element, element + 1))
    (after,) = recorded.tell(DigestRequest(cause=21))
    assert isinstance(after, DigestReply)
    assert isinstance(before, DigestReply)
    assert after.digest != before.digest


def test_no_digest_is_given_of_weights_in_an_update(recorded: Bench) -> None:
    recorded.node.header.begin_update(VERSION)
    with pytest.raises(StaleWeightsError, match="UPDATING"):
        recorded.tell(DigestRequest(cause=20))


def test_instructions_before_the_model_is_loaded_and_a_second_load_are_refused(node: Node) -> None:
    bench = Bench(node, lambda setup: RecordedEngine(setup, bench.story))
    for message in (Committed(cause=1, version=0), DigestRequest(cause=1)):
        with pytest.raises(StateError, match="before the model was loaded"):
            bench.tell(message)
    with pytest.raises(StateError, match="before the model was loaded"):
        bench.generate()
    bench.load()
    with pytest.raises(StateError, match="loaded already"):
        bench.load()
    assert bench.tell(Leave(reason="done")) == []
    assert bench.story[-1] == "close"


def test_another_parameter_table_is_refused_with_both_hashes(node: Node) -> None:
    bench = Bench(node)
    with pytest.raises(ModelError, match=f"got {node.table.hash}; needed {'0' * 64}"):
        bench.load(table_hash="0" * 64)


def test_a_unit_that_no_engine_can_sample_is_refused(recorded: Bench) -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        recorded.generate(sampling=recorded.node.sampling(forced_lengths=(99,)))


def test_weights_of_another_run_are_refused(node: Node) -> None:
    bench = Bench(node, lambda setup: RecordedEngine(setup, bench.story))
    node.segments.run_id = "another-run"
    bench.load()
    with pytest.raises(RollplexError, match="another run"):
        bench.generate()


def test_the_service_is_imported_without_torch() -> None:
    code = "import sys, rollplex_rollout.service, rollplex_rollout.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
