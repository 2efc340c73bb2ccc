"""Where the time before the first iteration goes."""

from __future__ import annotations

from pathlib import Path

from rollplex.journal import events
from rollplex.protocol.common import Kind, Role
from rollplex.trace.source import Source
from rollplex.trace.startup import stages
from rollplex.trace.where import startup_table
from support.journals import DEVICE, JournalScript, started


def test_journalled_stages_are_told_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.start(10.0)
        script.at(11.0, events.StageDone(name="data check", start_s=10.5, end_s=11.0))
        script.at(11.0, events.StageDone(name="import", start_s=9.0, end_s=10.0))
        script.phase(12.0, "EVAL")
        script.at(12.0, events.EvalStarted(step=0, version=0, name="held_out", rows=3))
        script.phase(13.0, "IDLE")
        script.iteration(0, 13.5)
        script.at(14.0, events.StageDone(name="import rewards", start_s=13.8, end_s=14.0))
    assert startup_table(script.path) == [
        "where the time before the first iteration goes, s",
        "    from      to    took",
        "    0.00    1.00    1.00  import",
        "    1.50    2.00    0.50  data check",
        "    3.00    4.00    1.00  evaluation held_out",
        "    0.00    4.50    4.50  in all, to the first iteration",
    ]


def test_without_them_the_events_that_end_them_give_a_coarser_picture(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.start(10.0)
        script.at(*started(10.25, Role.INPUT))
        script.at(*started(10.5, Role.PREFIX))
        script.at(
            11.0,
            events.LeaseGranted(lease=1, kind=Kind.ACTOR_WEIGHTS, owner="trainer", device=DEVICE, size_bytes=1),
        )
        script.at(13.0, events.ServiceReady(service="prefix[0:0]", role=Role.PREFIX, incarnation=1))
        script.phase(13.5, "IDLE")
        script.iteration(0, 14.0)
    with Source(script.path) as source:
        found = {stage.name: (stage.start_s, stage.end_s) for stage in stages(source.records())}
    assert found == {
        "processes": (10.0, 10.5),
        "input process, data check, memory plan": (10.5, 11.0),
        "prefix[0:0] starts and loads": (10.5, 13.0),
        "load model, import rewards": (11.0, 13.5),
        "in all, to the first iteration": (10.0, 14.0),
    }


def test_a_run_that_never_came_to_an_iteration_has_no_total(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.start(10.0)
        script.at(11.0, events.StageDone(name="import", start_s=9.0, end_s=10.0))
    assert startup_table(script.path)[2:] == ["    0.00    1.00    1.00  import"]


def test_a_journal_that_knows_nothing_of_a_start_says_so(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.phase(1.0, "IDLE")
    assert startup_table(script.path) == ["where the time before the first iteration goes: nothing is journalled"]
