"""An evaluation: every row once, greedily, at one version; means of what came back; nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rollplex.errors import RewardError
from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex.protocol.inputs import PrepareInputs
from rollplex.protocol.reward import RewardGroup, RewardPart
from rollplex.protocol.rollout import GenerateUnit
from rollplex_coordinator.processes.stop import StopRun
from rollplex_coordinator.steps.evaluate import Evaluation
from rollplex_coordinator.steps.iteration import Iteration
from support.core import NUM_ROWS, Core
from support.workers import doubles, reward_failed

MakeCore = Callable[..., Core]
NAN = float("nan")
SECTION = {"name": "held_out", "data": "other.jsonl"}


def evaluate(core: Core) -> dict[str, float]:
    return Evaluation(core.context, core.context.config.eval[0]).run()


def lines_of(core: Core, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (core.context.run_dir / name).read_text().splitlines()]


@pytest.fixture
def core(make_core: MakeCore) -> Core:
    return make_core(eval=[{**SECTION, "limit": 10}])


def test_every_row_is_sampled_once_greedily_with_draws_of_its_own(core: Core) -> None:
    core.record.version = 0
    evaluate(core)
    units = core.sent(GenerateUnit)
    assert [tuple(slot.row for slot in m.prompts) for m in units] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    for m in units:
        sampling = m.sampling
        assert (sampling.temperature, sampling.group_size, sampling.purpose) == (0.0, 1, "eval:held_out")
        assert (m.step, m.version) == (0, 0)
        assert m.kv.size_bytes == core.sizes.wants.rollout_kv(m.prompts, sampling, m.unit).size_bytes
    rewards = core.sent(RewardGroup)
    assert sorted(m.row for m in rewards) == list(range(10))
    assert {m.source for m in rewards} == {"held_out"}
    assert all(m.stopped == (m.responses.lengths[0] % 2 == 0,) for m in rewards)  # the fake's rule
    assert len({m.stopped for m in rewards}) == 2
    assert {m.source for m in core.sent(PrepareInputs)} == {"held_out"}


def test_without_a_limit_all_good_rows_are_used(make_core: MakeCore) -> None:
    core = make_core(eval=[SECTION])
    assert evaluate(core)["count"] == NUM_ROWS
    train, held_out = core.data.sources
    core.context.data = replace(core.data, sources=(train, replace(held_out, good_rows=(3, 8, 20))))
    assert evaluate(core)["count"] == 3
    assert sorted(m.row for m in core.sent(RewardGroup)[-3:]) == [3, 8, 20]


def test_the_next_batch_is_prepared_while_one_is_sampled(core: Core) -> None:
    evaluate(core)
    kinds = [type(entry[2]) for entry in core.story if type(entry[2]) in {PrepareInputs, GenerateUnit}]
    assert kinds == [PrepareInputs, PrepareInputs, GenerateUnit, PrepareInputs, GenerateUnit, GenerateUnit]


def test_means_are_over_what_is_there(core: Core) -> None:
    fine = core.workers.rewarded

    def answer(m: RewardGroup) -> list[Any]:
        value = [1.0, 0.5, NAN, 0.0][m.row % 4]
        return [replace(fine(m), rewards=doubles(value), by_function=(doubles(value),))]

    core.workers.answers[RewardGroup] = answer
    metrics = evaluate(core)
    values = [[1.0, 0.5, NAN, 0.0][row % 4] for row in range(10)]
    there = [value for value in values if value == value]  # noqa: PLR0124 - NaN differs
    assert metrics["reward"] == metrics["rewards/score/mean"] == pytest.approx(sum(there) / len(there))
    assert metrics["count"] == 10
    lengths = [sum(m.responses.lengths) for m in core.sent(RewardGroup)]
    assert metrics["completions/mean_length"] == pytest.approx(sum(lengths) / 10)
    (done,) = core.events(events.EvalDone)
    assert (done.name, done.step, done.version, done.metrics) == ("held_out", 0, 0, metrics)
    assert lines_of(core, "eval.jsonl") == [{"name": "held_out", "step": 0, "version": 0, **metrics}]


def test_every_response_is_written_down_in_the_order_of_the_rows(core: Core) -> None:
    fine = core.workers.rewarded
    core.workers.answers[RewardGroup] = lambda m: [replace(fine(m), texts=(f"answer to {m.row}",))]
    core.record.step = 20
    evaluate(core)
    found = lines_of(core, "completions.jsonl")
    assert [(row["group"], row["row"], row["completion"]) for row in found] == [
        (n, n, f"answer to {n}") for n in range(10)
    ]
    assert {(row["source"], row["step"], row["sample"]) for row in found} == {("held_out", 20, 0)}
    lengths = {m.row: m.responses.lengths for m in core.sent(RewardGroup)}
    assert [(row["tokens"],) for row in found] == [lengths[n] for n in range(10)]
    assert all(row["rewards"] == {"score": row["reward"]} for row in found)
    started = core.journal.events.index(events.EvalStarted(step=20, version=0, name="held_out", rows=10))
    assert started < core.journal.events.index(core.events(events.EvalDone)[0])


def test_an_evaluation_that_is_interrupted_leaves_its_beginning_and_no_result(core: Core) -> None:
    fine = core.workers.rewarded

    def answer(m: RewardGroup) -> list[Any]:
        if m.row == 7:
            core.link.stop(StopRun(source="SIGTERM", exit_code=0))
        return [fine(m)]

    core.workers.answers[RewardGroup] = answer
    with pytest.raises(StopRun):
        evaluate(core)
    assert core.events(events.EvalStarted)
    assert not core.events(events.EvalDone)
    assert lines_of(core, "eval.jsonl") == lines_of(core, "completions.jsonl") == []


def test_an_evaluation_changes_nothing(core: Core) -> None:
    core.record.step = 0
    Iteration(core.context, step=0, rows=(4, 9, 14, 2), ahead=(21, 7, 3, 16)).run()
    before = (core.record.version, core.context.gate.version, core.context.gate.step, core.leased)
    evaluate(core)
    assert (core.record.version, core.context.gate.version, core.context.gate.step, core.leased) == before
    assert core.ledger.phase is core.record.phase is Phase.IDLE
    assert [event.phase for event in core.events(events.PhaseEntered)][-2:] == ["EVAL", "IDLE"]
    core.record.step = 1
    Iteration(core.context, step=1, rows=(21, 7, 3, 16), ahead=None).run()
    assert core.record.version == 2


def test_a_failed_reward_ends_it_whatever_the_policy_for_training(make_core: MakeCore) -> None:
    core = make_core(eval=[SECTION], rewards={"on_error": "skip_group"})
    core.workers.answers[RewardGroup] = lambda m: [reward_failed(m)]
    with pytest.raises(RewardError, match="evaluation held_out, group .*, row .*: reward function moody raised"):
        evaluate(core)


def test_an_evaluation_without_a_single_reward_is_an_error_and_not_0(core: Core) -> None:
    fine = core.workers.rewarded
    core.workers.answers[RewardGroup] = lambda m: [replace(fine(m), rewards=doubles(NAN), by_function=(doubles(NAN),))]
    with pytest.raises(RewardError, match="evaluation held_out has no reward"):
        evaluate(core)


def test_means_do_not_depend_on_the_order_of_answers_and_other_numbers_have_theirs(make_core: MakeCore) -> None:
    """0.1 and the like summed one after the other would give other last bits in another order."""
    found = set()
    for seed in range(6):
        core = make_core(seed=seed, eval=[SECTION])
        fine = core.workers.rewarded

        def answer(m: RewardGroup, fine: Callable[[RewardGroup], Any] = fine) -> list[Any]:
            value = doubles(0.1 * (m.row % 7))
            part = RewardPart(function=0, name="format", values=value)
            return [replace(fine(m), rewards=value, by_function=(value,), parts=(part,) if m.row % 2 else ())]

        core.workers.answers[RewardGroup] = answer
        metrics = evaluate(core)
        odd = [0.1 * (row % 7) for row in range(1, NUM_ROWS, 2)]
        assert metrics["rewards/score/format/mean"] == pytest.approx(sum(odd) / len(odd))
        found.add((metrics["reward"], metrics["rewards/score/mean"], metrics["rewards/score/format/mean"]))
    assert len(found) == 1
