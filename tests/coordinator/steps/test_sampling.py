"""Tables of samples: which steps have one, of what, and that nobody waits for pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rollplex.protocol.inputs import PrepareInputs, RowShown, RowsShown, ShowRows, Thumbnail
from rollplex.protocol.reward import RewardGroup, RewardProblem
from rollplex.protocol.rollout import GenerateUnit
from rollplex_coordinator.steps.iteration import Iteration
from support.core import Core
from support.files import PNG, events_in
from support.workers import doubles, reward_failed

MakeCore = Callable[..., Core]
ROWS = (4, 9, 14, 2)


def iterate(core: Core, *steps: int) -> None:
    for step in steps:
        core.record.step = step
        Iteration(core.context, step=step, rows=ROWS, ahead=None).run()
    core.link.pump(lambda: core.hub.idle)


def written(core: Core, step: int) -> dict[str, Any]:
    found = json.loads((core.context.run_dir / f"samples/step_{step}.json").read_text())
    assert isinstance(found, dict)
    return found


def shown(m: ShowRows) -> list[Any]:
    picture = Thumbnail(name="image 1", png=PNG, width=96, height=40)
    rows = tuple(RowShown(row=row, prompt=f"row {row}?", media=(picture,)) for row in m.rows)
    return [RowsShown(cause=m.cause, step=m.step, rows=rows)]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [0, 1, 2, 3]), (3, [0, 3])])
def test_the_first_of_every_so_many_iterations_has_a_table(make_core: MakeCore, every: int, steps: list[int]) -> None:
    core = make_core(run={"sample_every": every})
    iterate(core, 0, 1, 2, 3)
    assert [message.step for message in core.sent(ShowRows)] == steps
    folder = core.context.run_dir / "samples"
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert names == {f"step_{step}.{kind}" for step in steps for kind in ("html", "json")}


def test_a_table_has_the_first_groups_whatever_is_logged_beside_it(make_core: MakeCore) -> None:
    core = make_core(run={"sample_groups": 2, "log_completions": 1})
    fine = core.workers.rewarded
    values = (1.0, 0.0, 0.5)

    def answer(m: RewardGroup) -> list[Any]:
        texts = tuple(f"{m.row}:{n}" for n in range(3))
        return [replace(fine(m), texts=texts, rewards=doubles(*values), by_function=(doubles(*values),))]

    core.workers.answers[RewardGroup] = answer
    core.workers.answers[ShowRows] = shown
    iterate(core, 0)
    (asked,) = core.sent(ShowRows)
    assert (asked.source, asked.rows) == ("train", ROWS[:2])
    table = written(core, 0)
    assert [(group["row"], group["prompt"]) for group in table["groups"]] == [(4, "row 4?"), (9, "row 9?")]
    for group in table["groups"]:
        told = [(item["completion"], item["reward"], item["rewards"]) for item in group["responses"]]
        assert told == [(f"{group['row']}:{n}", value, {"score": value}) for n, value in enumerate(values)]
        first, second, third = (item["advantage"] for item in group["responses"])
        assert first > 0 > second
        assert third == 0
    lines = (core.context.run_dir / "completions.jsonl").read_text().splitlines()
    assert {json.loads(line)["group"] for line in lines} == {0}


def test_rows_are_asked_for_before_the_step_and_pictures_are_in_tensorboard(make_core: MakeCore) -> None:
    core = make_core(run={"sample_groups": 2})
    core.workers.answers[ShowRows] = shown
    iterate(core, 0)
    kinds = [type(entry[2]) for entry in core.story if entry[0] == "send"]
    assert kinds.index(ShowRows) < kinds.index(GenerateUnit)
    core.record.close()
    values = {value.tag: value for event in events_in(core.context.run_dir) for value in event.summary.value}
    assert "| response | advantage | reward | score | tokens |" in values["samples"].tensor.string_val[0].decode()
    assert values["samples/group_1"].image.encoded_image_string == PNG
    assert "samples/group_2" not in values


def test_an_answer_that_comes_late_completes_the_table_of_its_step(make_core: MakeCore) -> None:
    core = make_core(run={"sample_every": 2, "sample_groups": 1})
    late: list[Any] = []

    def keep(m: ShowRows) -> list[Any]:
        late.extend(shown(m))
        return []

    core.workers.answers[ShowRows] = keep
    iterate(core, 0)
    before = written(core, 0)
    assert not before["shown"]
    assert before["groups"][0]["missing"] == "the input process has not answered yet"
    assert len(before["groups"][0]["responses"]) == 3
    prepare = core.workers.answers[PrepareInputs]
    core.workers.answers[PrepareInputs] = lambda m: [*late, *prepare(m)]  # it comes in the next step
    iterate(core, 1)
    after = written(core, 0)
    assert after["groups"][0]["prompt"] == "row 4?"
    assert after["groups"][0]["responses"] == before["groups"][0]["responses"]


def test_a_group_without_rewards_says_why(make_core: MakeCore) -> None:
    core = make_core(rewards={"on_error": "skip_group"})
    fine = core.workers.rewarded
    core.workers.answers[RewardGroup] = lambda m: (
        [reward_failed(m, RewardProblem.RAISED)] if m.responses.group == 2 else [fine(m)]
    )
    iterate(core, 0)
    groups = written(core, 0)["groups"]
    assert [len(group["responses"]) for group in groups] == [3, 3, 0, 3]
    assert groups[2]["skipped"] == "moody: not to my taste"
    assert [bool(group["skipped"]) for group in groups] == [False, False, True, False]
