"""Recorded responses again: what is announced when, and every file that cannot be replayed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollplex.errors import EngineError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import plan
from rollplex.protocol.common import Parallel
from rollplex.protocol.rollout import EngineSpec
from rollplex_rollout.engine import FinishedGroup, UnitReport
from rollplex_rollout.replay import ReplayEngine

if TYPE_CHECKING:
    from rollout.conftest import Node

STEP = 2


def line(group: int, sample: int, **changes: Any) -> dict[str, Any]:
    """A response of `length` tokens, as a run writes it down; keys that a replay has no use for are there too."""
    length = changes.pop("length", 1 + group + sample)
    values: dict[str, Any] = {
        "source": "train",
        "step": STEP,
        "version": 1,
        "row": 0,
        "group": group,
        "sample": sample,
        "completion": "…",
        "reward": 1.0,
        "stopped": sample == 0,
        "ids": [10 * group + sample] * length,
        "logprobs": [-0.1 - sample] * length,
    }
    return values | changes


@pytest.fixture
def record(tmp_path: Path, shared_node: Node) -> Any:
    """record(lines) → the engine over a file of them; without lines two groups of two samples, out of order."""
    rows = {slot.group: slot.row for slot in shared_node.slots}

    def make(lines: list[Any] | None = None, *, replay_s: float = 0.0, **place: Any) -> ReplayEngine:
        file = tmp_path / "completions.jsonl"
        given = [line(g, s, row=rows[g]) for g in (1, 0) for s in (1, 0)] if lines is None else lines
        file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in given))
        engine = EngineSpec(name="replay", replay=str(file), replay_s=replay_s)
        return ReplayEngine(replace(shared_node.setup, engine=engine, **place))

    return make


def generate(engine: ReplayEngine, node: Node, **sampling: Any) -> tuple[list[FinishedGroup], UnitReport]:
    announced: list[FinishedGroup] = []
    unit = node.unit((0, 1), step=STEP, **{"group_size": 2, "max_new_tokens": 8, **sampling})
    return announced, engine.generate(unit, announced.append)


def test_recorded_groups_come_again_shortest_first_sample_by_sample(record: Any, shared_node: Node) -> None:
    announced, report = generate(record(), shared_node)
    assert [group.group for group in announced] == [0, 1]
    first, second = announced
    assert (first.lengths, second.lengths) == ((1, 2), (2, 3))
    assert second.tokens.tolist() == [10, 10, 11, 11, 11]
    assert second.logprobs.tolist() == [-0.1, -0.1, -1.1, -1.1, -1.1]
    assert first.stopped == (True, False)
    assert (report.decode_steps, report.vision_prompts, report.kv_bytes) == (2, 0, 0)
    assert report.start_s == report.prefill_end_s <= report.end_s


def test_each_of_several_engines_and_each_of_their_ranks_replays_the_groups_of_its_units(
    record: Any, shared_node: Node
) -> None:
    """A rank meets nobody: it computes nothing."""
    announced = {group.group: group for group in generate(record(), shared_node)[0]}
    layouts = TrainingLayout(degree=1), RolloutLayout(degree=2)
    devices = plan(shared_node.table, shared_node.shape, *layouts).devices
    for engine, group in enumerate((1, 0)):
        unit = shared_node.unit((group,), step=STEP, group_size=2)
        for rank, device in enumerate(devices):
            place = Parallel(rollout=2, device=rank, rank=rank, replica=engine, replicas=2, meet="/nowhere/to/meet")
            again, seen = record(parallel=place, device=device), list[FinishedGroup]()
            assert again.generate(unit, seen.append).decode_steps == max(announced[group].lengths) - 1
            assert [one.group for one in seen] == [group]
            assert seen[0].tokens.tobytes() == announced[group].tokens.tobytes()
            assert again.digest() == shared_node.header.read().digest


def test_a_replay_is_not_on_policy_and_holds_no_keys_and_values(record: Any, shared_node: Node) -> None:
    engine = record()
    assert not engine.on_policy
    assert engine.kv_bytes(shared_node.unit()) == 0
    assert engine.actor is shared_node.setup.actor
    assert engine.digest() == shared_node.header.read().digest


def test_the_ends_of_groups_can_be_spread_over_time(
    record: Any, shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("rollplex_rollout.replay.time.sleep", slept.append)
    generate(record(replay_s=10.0), shared_node)
    assert slept == [pytest.approx(5.0, abs=0.5), pytest.approx(10.0, abs=0.5)]


def test_evaluations_and_responses_without_tokens_are_not_replayed(record: Any) -> None:
    bare = {key: value for key, value in line(0, 0).items() if key not in ("ids", "logprobs")}
    with pytest.raises(EngineError, match=r"no responses to replay.*run\.log_tokens"):
        record([line(0, 0, source="held_out"), bare])


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([line(0, 0), line(0, 1)], r"A group was not recorded whole; got 0 responses"),
        ([line(0, 0), line(0, 1), line(1, 0)], r"A group was not recorded whole; got 1 responses"),
        ([line(0, 0), line(0, 0), line(1, 0), line(1, 1)], r"A group was not recorded whole; got 2 responses"),
        ([line(g, s, row=77) for g in (0, 1) for s in (0, 1)], r"answer another prompt; got row 77"),
        ([line(g, s, length=9) for g in (0, 1) for s in (0, 1)], r"has a length that this run does not have; got 9"),
        ([line(g, s, step=3) for g in (0, 1) for s in (0, 1)], r"not recorded whole; got 0 responses"),
    ],
)
def test_a_group_that_is_not_there_as_it_is_wanted_is_named(
    record: Any, shared_node: Node, lines: list[dict[str, Any]], problem: str
) -> None:
    rows = {slot.group: slot.row for slot in shared_node.slots}
    engine = record([one if one["row"] == 77 else one | {"row": rows[one["group"]]} for one in lines])
    with pytest.raises(EngineError, match=problem) as caught:
        generate(engine, shared_node)
    assert f"step {STEP}, group" in str(caught.value)


def test_a_response_of_another_length_than_the_forced_one_is_refused_since_memory_is_planned_for_that(
    record: Any, shared_node: Node
) -> None:
    engine = record()
    assert len(generate(engine, shared_node, forced_lengths=(1, 2, 2, 3))[0]) == 2
    for second in ([2, 2], [2, 4]):
        with pytest.raises(
            EngineError, match=rf"got 2 to 3 tokens; needed {re.escape(str(second))}, as rollout\.forced"
        ):
            generate(engine, shared_node, forced_lengths=(1, 2, *second))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["{"], "not a file of responses"),
        (['{"source": "train"}'], "not a file of responses"),
        ([line(0, 0, logprobs=[0.0, 0.0])], r":1: A recorded response is not whole; got 1 tokens, 2 log-probabilities"),
    ],
)
def test_a_file_of_another_kind_is_refused(record: Any, lines: list[Any], problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        record(lines)


def test_a_file_that_is_not_there_is_named(shared_node: Node, tmp_path: Path) -> None:
    engine = EngineSpec(name="replay", replay=str(tmp_path / "none.jsonl"))
    with pytest.raises(EngineError, match=r"cannot be read.*none\.jsonl"):
        ReplayEngine(replace(shared_node.setup, engine=engine))
