"""One iteration: what follows what, what is written down, what is given back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollplex.advantages import group_advantages
from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex.protocol.inputs import PrepareInputs
from rollplex.protocol.prefix import PrefixForward
from rollplex.protocol.reward import RewardGroup, RewardPart, RewardProblem
from rollplex.protocol.rollout import GenerateUnit
from rollplex.protocol.trainer import Loss, PrepareUpdate, Scale, TrainSuffix, UpdateVote
from rollplex_coordinator.decisions.gate import State
from rollplex_coordinator.steps.iteration import Iteration
from support.core import NUM_ROWS, Core
from support.workers import doubles, prompts_of, reward_failed

MakeCore = Callable[..., Core]
ROWS, NEXT = (4, 9, 14, 2), (21, 7, 3, 16)
NAN = float("nan")


def iterate(
    core: Core, step: int = 0, rows: tuple[int, ...] = ROWS, ahead: tuple[int, ...] | None = None
) -> dict[str, Any]:
    core.record.step = step
    return Iteration(core.context, step=step, rows=rows, ahead=ahead).run()


def written(core: Core) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (core.context.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_an_iteration_moves_the_weights_by_one_version_and_leaves_nothing_behind(make_core: MakeCore) -> None:
    core = make_core()
    row = iterate(core)
    assert (row["step"], row["version"], row["updated"], row["loss"]) == (0, 0, 1.0, 0.5)
    assert (core.record.version, core.context.gate.version, core.context.gate.step) == (1, 1, 1)
    assert core.context.gate.state is State.OPEN
    assert not core.leased
    assert not core.holder.measured()
    assert core.ledger.phase is core.record.phase is Phase.IDLE
    phases = [event.phase for event in core.events(events.PhaseEntered)][-5:]
    assert phases == ["ROLLOUT", "SCORE", "TRAIN", "UPDATE", "IDLE"]
    (started,), (done,) = core.events(events.IterationStarted), core.events(events.IterationDone)
    assert (started.step, started.version, started.rows) == (0, 0, ROWS)
    assert (done.step, done.version) == (0, 1)
    assert written(core) == [row]


def test_the_next_step_s_inputs_are_made_meanwhile_and_used(make_core: MakeCore) -> None:
    core = make_core()
    iterate(core, ahead=NEXT)
    kinds = [type(entry[2]) for entry in core.story if entry[0] == "send"]
    assert [m.rows for m in core.sent(PrepareInputs)] == [ROWS, NEXT]
    assert kinds.index(GenerateUnit) > [i for i, kind in enumerate(kinds) if kind is PrepareInputs][1]
    assert len(core.leased) == 1
    core.record.step = 1
    Iteration(core.context, step=1, rows=NEXT, ahead=None).run()
    assert len(core.sent(PrepareInputs)) == 2
    assert core.record.version == 2
    assert not core.leased


def test_a_skipped_update_is_an_iteration_too(make_core: MakeCore) -> None:
    core = make_core()
    core.workers.answers[PrepareUpdate] = lambda m: [
        UpdateVote(cause=m.cause, step=m.step, finite=False, start_s=0.0, end_s=0.5, metrics={"loss": NAN})
    ]
    row = iterate(core)
    assert (row["updated"], row["loss"], core.record.version) == (0.0, None, 0)
    assert written(core)[0]["loss"] is None
    assert math.isnan(core.events(events.IterationDone)[0].metrics["loss"])


def test_rewards_are_reported_by_function_and_abstentions_left_out(make_core: MakeCore) -> None:
    functions = [{"function": "score.py:right"}, {"function": "score.py:short"}]
    core = make_core(rewards={"functions": functions, "on_error": "skip_group"})
    fine = core.workers.rewarded
    right = [(1.0, 0.0, NAN), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)]

    def answer(m: RewardGroup) -> list[Any]:
        if m.responses.group == 3:
            return [reward_failed(m, RewardProblem.RAISED)]
        values = right[m.responses.group]
        return [replace(fine(m), rewards=doubles(*values), by_function=(doubles(*values), doubles(NAN, NAN, NAN)))]

    core.workers.answers[RewardGroup] = answer
    row = iterate(core)
    values = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    mean = sum(values) / 8
    assert row["rewards/right/mean"] == mean
    assert row["rewards/right/std"] == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in values) / 7))
    assert (row["rewards/short/mean"], row["rewards/short/std"]) == (None, 0.0)
    assert row["skipped_groups"] == 1.0


def test_numbers_that_functions_report_beside_rewards_have_means_over_those_that_have_them(make_core: MakeCore) -> None:
    core = make_core(rewards={"functions": [{"function": "score.py:right"}, {"function": "score.py:short"}]})
    fine = core.workers.rewarded

    def answer(m: RewardGroup) -> list[Any]:
        group = m.responses.group
        parts = [RewardPart(function=1, name="format", values=doubles(0.5, group))]
        parts += [RewardPart(function=0, name="format", values=doubles(1.0))] if group == 2 else []
        return [replace(fine(m), by_function=(doubles(0.0, 0.0, 0.0),) * 2, parts=tuple(parts))]

    core.workers.answers[RewardGroup] = answer
    row = iterate(core)
    assert row["rewards/short/format/mean"] == (4 * 0.5 + 0 + 1 + 2 + 3) / 8
    assert row["rewards/right/format/mean"] == 1.0


def test_lengths_and_stops_are_those_of_all_completions(make_core: MakeCore) -> None:
    core = make_core(rollout={"forced_lengths": [1, 2, 3, 4, 6]})
    row = iterate(core)
    lengths = [[1, 2, 3, 4, 6][i % 5] for i in range(12)]
    assert row["completions/mean_length"] == pytest.approx(sum(lengths) / 12)
    assert (row["completions/min_length"], row["completions/max_length"]) == (1.0, 6.0)
    stopped = [length for length in lengths if length % 2 == 0]  # the fake's rule
    assert row["completions/clipped_ratio"] == pytest.approx(1 - len(stopped) / 12)
    assert row["completions/mean_terminated_length"] == pytest.approx(sum(stopped) / len(stopped))
    assert (row["completions/min_terminated_length"], row["completions/max_terminated_length"]) == (2.0, 6.0)
    assert row["completions/total_tokens"] == sum(lengths)


def test_where_no_response_ends_by_itself_the_terminated_lengths_are_0(make_core: MakeCore) -> None:
    row = iterate(make_core(rollout={"forced_lengths": [3]}))
    assert row["completions/clipped_ratio"] == 1.0
    assert [row[f"completions/{name}_terminated_length"] for name in ("mean", "min", "max")] == [0.0, 0.0, 0.0]


def test_tokens_are_counted_from_the_start_a_prompt_once_for_each_of_its_responses(make_core: MakeCore) -> None:
    core = make_core()
    first = iterate(core, ahead=NEXT)
    second = iterate(core, step=1, rows=NEXT)
    total = 0
    for row, rows in ((first, ROWS), (second, NEXT)):
        tokens = [slot.tokens for slot in prompts_of(rows)[0]]
        assert (row["prompts/mean_length"], row["prompts/max_length"]) == (sum(tokens) / 4, max(tokens))
        total += 3 * sum(tokens) + row["completions/total_tokens"]
        assert row["num_tokens"] == total


def test_an_epoch_is_one_pass_over_the_good_rows(make_core: MakeCore) -> None:
    core = make_core(data={"shuffle": False})
    assert iterate(core)["epoch"] == 4 / NUM_ROWS
    shuffled = make_core()
    train, *others = shuffled.data.sources
    good = tuple(range(2, 17))
    shuffled.context.data = replace(shuffled.data, sources=(replace(train, good_rows=good), *others))
    assert iterate(shuffled)["epoch"] == 1 / 3  # 15 rows are 3 steps of 4


@pytest.mark.parametrize("groups", [0, 1, 3, 9])
def test_the_responses_of_the_first_groups_are_written_down(make_core: MakeCore, groups: int) -> None:
    core = make_core(run={"log_completions": groups}, rewards={"on_error": "skip_group"})
    fine = core.workers.rewarded

    def answer(m: RewardGroup) -> list[Any]:
        if m.responses.group == 2:
            return [reward_failed(m, RewardProblem.RAISED)]
        return [replace(fine(m), texts=tuple(f"{m.row}:{n}" for n in range(3)))]

    core.workers.answers[RewardGroup] = answer
    iterate(core)
    found = [json.loads(line) for line in (core.context.run_dir / "completions.jsonl").read_text().splitlines()]
    told = [group for group in (0, 1, 3) if group < groups]  # the group without a reward has no text
    assert [(row["group"], row["row"], row["sample"], row["completion"]) for row in found] == [
        (group, ROWS[group], n, f"{ROWS[group]}:{n}") for group in told for n in range(3)
    ]
    lengths = {event.group: event.lengths for event in core.events(events.GroupFinished)}
    for row in found:
        assert (row["source"], row["step"], row["version"]) == ("train", 0, 0)
        assert row["tokens"] == lengths[row["group"]][row["sample"]]
        assert row["stopped"] == (row["tokens"] % 2 == 0)  # the fake's rule
        assert row["rewards"] == {"score": row["reward"]}


@pytest.mark.parametrize(("loss", "scale"), [("grpo", "none"), ("grpo", "group"), ("rloo", "none"), ("dapo", "batch")])
def test_the_advantages_written_down_are_the_trainers(make_core: MakeCore, loss: str, scale: str) -> None:
    core = make_core(run={"log_completions": 4}, algorithm={"loss": loss, "scale_rewards": scale})
    rewards = {0: (1.0, 0.0, 0.25), 1: (1.0, 1.0, 1.0), 2: (NAN, 0.5, 2.0), 3: (NAN, NAN, NAN)}
    fine = core.workers.rewarded

    def answer(m: RewardGroup) -> list[Any]:
        values = doubles(*rewards[m.responses.group])
        return [replace(fine(m), rewards=values, by_function=(values,))]

    core.workers.answers[RewardGroup] = answer
    iterate(core)
    found = [json.loads(line) for line in (core.context.run_dir / "completions.jsonl").read_text().splitlines()]
    wanted: dict[int, list[float | None]] = {}
    for message in core.sent(TrainSuffix):  # what the trainer computes them from
        batch = np.frombuffer(message.batch_rewards) if message.batch_rewards else None
        for response, blob in zip(message.responses, message.rewards, strict=True):
            own = group_advantages(np.frombuffer(blob), loss=Loss(loss), scale=Scale(scale), batch_rewards=batch)
            pairs = zip(own.values.tolist(), own.weights.tolist(), strict=True)
            wanted[response.group] = [value if weight else None for value, weight in pairs]
    told = {group: [row["advantage"] for row in found if row["group"] == group] for group in range(4)}
    assert told == wanted
    assert told[3] == [None, None, None]
    assert told[0][0] > 0


@pytest.mark.parametrize(
    ("span", "share"),
    [((10.0, 20.0), 1.0), ((0.0, 10.0), 0.0), ((5.0, 15.0), 0.5), ((30.0, 40.0), 0.0), ((0.0, 40.0), 0.5)],
)
def test_the_share_of_prefix_time_inside_the_rollout_is_time_inside_the_window(
    make_core: MakeCore, span: tuple[float, float], share: float
) -> None:
    core = make_core(algorithm={"beta": 0.0})
    forward, generate = core.workers.answers[PrefixForward], core.workers.answers[GenerateUnit]
    core.workers.answers[PrefixForward] = lambda m: [replace(forward(m)[0], start_s=span[0], end_s=span[1])]

    def window(m: GenerateUnit) -> list[Any]:
        *groups, end = generate(m)
        return [*groups, replace(end, start_s=10.0, end_s=30.0)]

    core.workers.answers[GenerateUnit] = window
    assert iterate(core)["time/prefix_in_window"] == pytest.approx(share)


def test_with_several_decode_units_the_window_is_from_the_first_to_the_last(make_core: MakeCore) -> None:
    core = make_core(batching={"decode_prompts": 2}, algorithm={"beta": 0.0})
    forward, generate = core.workers.answers[PrefixForward], core.workers.answers[GenerateUnit]
    core.workers.answers[PrefixForward] = lambda m: [replace(forward(m)[0], start_s=10.0, end_s=30.0)]

    def windows(m: GenerateUnit) -> list[Any]:
        *groups, end = generate(m)
        return [*groups, replace(end, start_s=10.0 * (1 + m.unit), end_s=10.0 * (2 + m.unit))]

    core.workers.answers[GenerateUnit] = windows
    assert iterate(core)["time/prefix_in_window"] == 1.0


def test_only_what_depends_on_the_clock_is_called_time(make_core: MakeCore, tmp_path: Path) -> None:
    rows = []
    for _ in range(2):
        core = make_core(seed=3)
        rows.append(iterate(core))
    assert {name for name in rows[0] if name.startswith("time/")} >= {
        "time/step_s",
        "time/rollout_s",
        "time/score_s",
        "time/train_s",
        "time/update_s",
    }
    one, two = ({k: v for k, v in row.items() if not k.startswith("time/")} for row in rows)
    assert json.dumps(one) == json.dumps(two)
    assert all(re.match(r"^[a-z_/]+$", name) for name in rows[0])


def test_phase_times_are_of_this_iteration_only(make_core: MakeCore) -> None:
    core = make_core()
    core.record.phase_seconds[Phase.ROLLOUT] = 1000.0
    assert iterate(core)["time/rollout_s"] < 1000.0
