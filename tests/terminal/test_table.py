"""The table of a run as text."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from rollplex.terminal.table import render
from rollplex.terminal.view import View, Wait
from support.views import FULL


def text(view: View, width: int = 100) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render(view))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_everything_that_is_known_has_a_line() -> None:
    assert text(FULL) == [
        "digits-1",
        "phase       ROLLOUT  overlap, weights version 99",
        "iterations  100/400  ━━━━━━━╸                        1 min 15 s, about 14 s left",
        "reward      0.523",
        "evaluation  held_out after 100: reward 0.610, right 0.600",
        "seconds             iteration  rollout",
        "            last        0.050    0.031",
        "            median      0.048    0.030",
        "            66% of prefix time hidden under the rollout",
        "memory      device 0:0  3 MiB of 4 GiB leased, at most 5 MiB",
        "services    rollout busy   trainer ready",
        "waiting     for rollout[0:0]: generate groups 0-3, 3 s",
    ]


def test_what_is_not_known_yet_has_none() -> None:
    early = replace(
        FULL,
        phase="LOAD",
        done=0,
        wanted=0,
        left_s=None,
        reward=None,
        hidden=None,
        timings=(),
        evaluations=(),
        memory=(),
        services=(),
        waits=(),
    )
    assert text(early) == ["digits-1", "phase       LOAD  overlap, weights version 99"]


def test_a_run_that_stops_says_so() -> None:
    assert "stopping: after the iteration" in text(replace(FULL, stopping="after_iteration"))[1]


def test_more_iterations_than_were_wanted_are_no_nonsense() -> None:
    assert "iterations  3/3 " in text(replace(FULL, done=3, wanted=0, left_s=None))[2]


def test_a_narrow_terminal_gets_narrow_lines() -> None:
    assert max(len(line) for line in text(FULL, width=60)) <= 60


def test_only_the_oldest_waits_are_shown() -> None:
    waits = tuple(Wait(what=f"unit {n}", source="prefix[0:0]", age_s=9.0) for n in range(9))
    assert sum(line.startswith("waiting") for line in text(replace(FULL, waits=waits))) == 3
