"""Prefix work beside a rollout: which share it is told to keep to, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollplex.journal.phases import Phase
from rollplex.protocol.prefix import PrefixForward
from rollplex_coordinator.decisions.window import Window
from support.core import Core

MakeCore = Callable[..., Core]
ROWS = (4, 9, 14, 2)


class Told:
    """Notes what is said, and when, among the coordinator's messages."""

    def __init__(self, story: list[tuple[Any, ...]]) -> None:
        self._story = story
        self.said: list[bool] = []

    def say(self, *, beside: bool) -> None:
        if not self.said or self.said[-1] != beside:
            self.said.append(beside)
            self._story.append(("beside", beside))


def run(core: Core, window: Window) -> Told:
    told = Told(core.story)
    core.context.window, core.context.notice = window, told
    step, _ = core.begin(ROWS)
    step.run()
    return told


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["serial", "overlap", "stream"])
def test_a_forward_keeps_to_its_share_exactly_while_the_rollout_goes_on(
    make_core: MakeCore, mode: str, seed: int
) -> None:
    core = make_core(
        seed, run={"schedule": mode}, batching={"decode_prompts": 2, "prefix_prompts": 1}, algorithm={"beta": 0.1}
    )
    forward, sent = core.workers.answers[PrefixForward], []

    def noted(m: PrefixForward) -> list[Any]:
        sent.append((core.record.phase, m.share))
        return forward(m)

    core.workers.answers[PrefixForward] = noted
    told = run(core, Window(prefix_share=0.6, decode_share=0.4))
    assert len(sent) == 2 * len(ROWS)
    assert all(share == (0.6 if phase is Phase.ROLLOUT else 1.0) for phase, share in sent), sent
    assert told.said[-1] is False
    assert mode != "serial" or told.said == [False]


def test_it_is_said_when_prefix_work_begins_and_ends_beside_the_rollout(make_core: MakeCore) -> None:
    core = make_core(run={"schedule": "overlap"}, batching={"prefix_prompts": 1})
    assert run(core, Window(prefix_share=0.6)).said == [True, False]


def test_where_nobody_is_limited_nothing_is_said(make_core: MakeCore) -> None:
    core = make_core(run={"schedule": "overlap"}, batching={"prefix_prompts": 1})
    assert run(core, Window()).said == [False]
    assert {m.share for m in core.sent(PrefixForward)} == {1.0}


def test_with_the_window_of_decoding_forwards_wait_until_the_prompts_are_read(make_core: MakeCore) -> None:
    core = make_core(
        run={"schedule": "overlap"}, device={"window": "decode"}, batching={"decode_prompts": 2, "prefix_prompts": 1}
    )
    step, _ = core.begin(ROWS)
    schedule, sent = step._schedule, dict[int, int]()
    prefilled = schedule.prefilled

    def counted(unit: int) -> list[Any]:
        sent[unit] = len(core.sent(PrefixForward))
        return prefilled(unit)

    schedule.prefilled = counted  # type: ignore[method-assign]
    step.run()
    assert sorted(sent) == [0, 1]
    assert sent[0] == 0
    assert len(core.sent(PrefixForward)) == len(ROWS) * 2
