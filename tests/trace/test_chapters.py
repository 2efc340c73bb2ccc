"""The journal told as chapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.errors import ConfigError, JournalError
from rollplex.journal import events
from rollplex.protocol.common import ErrorReport, Kind, Role
from rollplex.trace import marks
from rollplex.trace.marks import OPEN, Chapter, Mark, Sample, ns
from rollplex.trace.source import Source
from rollplex.trace.steps import Steps
from support.journals import DEVICE, STEP_S, WALL_S, JournalScript, run_of, started


def chapters(journal: Path, steps: Steps | None = None, *, memory: bool = True) -> list[Chapter]:
    with Source(journal) as source:
        return list(source.chapters(steps or Steps(), memory=memory))


def named(chapter: Chapter, name: str) -> Mark:
    (found,) = [mark for mark in chapter.marks if mark.name == name]
    return found


def span(mark: Mark) -> tuple[int, int]:
    assert mark.end_ns is not None
    return mark.start_ns, mark.end_ns


def between(start_s: float, end_s: float) -> tuple[int, int]:
    return ns(start_s), ns(end_s)


def test_each_iteration_is_a_chapter_and_what_came_before_is_one_too(tmp_path: Path) -> None:
    told = chapters(run_of(tmp_path, 3))
    assert [(chapter.step, chapter.done) for chapter in told] == [(None, False), (0, True), (1, True), (2, True)]
    assert span(named(told[2], "iteration 1")) == between(11.2, 11.381)
    assert dict(named(told[2], "iteration 1").args) == {"version": 1, "prompts": 2, "reward": 0.5, "loss": 0.25}


def test_a_rollout_unit_has_prefill_and_decode_in_it_and_its_groups_as_moments(tmp_path: Path) -> None:
    chapter = chapters(run_of(tmp_path, 1))[1]
    assert span(named(chapter, "rollout 0")) == between(11.02, 11.1)
    assert span(named(chapter, "prefill")) == between(11.02, 11.04)
    assert span(named(chapter, "decode")) == between(11.04, 11.1)
    done = named(chapter, "group 1 done")
    assert (done.track, done.start_ns, done.end_ns) == ("rollout[0:0]", ns(11.1), None)
    assert dict(done.args) == {"row": 1, "responses": 2, "tokens": 7}


def test_a_journal_without_the_time_of_decoding_gives_the_unit_alone(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.at(1.0, events.IterationStarted(step=0, version=0, rows=(0,)))
        unit = events.UnitDone(
            step=0, kind=events.UnitKind.GENERATE, unit=0, service="rollout[0:0]", start_s=1.0, end_s=2.0, groups=(0,)
        )
        script.at(2.0, unit)
    (chapter,) = chapters(tmp_path / "journal.sqlite")
    assert {mark.name for mark in chapter.marks if mark.track == "rollout[0:0]"} == {"rollout 0"}


def test_the_update_is_cut_at_begin_and_commit_and_the_trainer_steps_inside(tmp_path: Path) -> None:
    chapter = chapters(run_of(tmp_path, 1))[1]
    assert span(named(chapter, "update 0")) == between(11.16, 11.18)
    assert span(named(chapter, "drain")) == between(11.16, 11.162)
    assert span(named(chapter, "BEGIN to COMMIT")) == between(11.162, 11.17)
    assert span(named(chapter, "readers go on")) == between(11.17, 11.18)
    step = named(chapter, "optimizer step 0")
    assert (step.track, *span(step)) == ("trainer[0:0]", *between(11.163, 11.168))


def test_copies_to_other_devices_lie_between_the_optimizers_step_and_the_commit(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.phase(1.0, "UPDATE", 0)
        script.at(1.1, events.UpdateBegin(step=0, version=0))
        committed = events.UpdateCommitted(
            step=0, version=1, digest="d", start_s=1.2, end_s=1.3, refreshed_bytes=7, rebuilt_bytes=2, published_s=1.4
        )
        script.at(1.5, committed)
        script.phase(1.6, "IDLE", 0)
    (chapter,) = chapters(tmp_path / "journal.sqlite")
    copies = named(chapter, "copies to other devices")
    assert (copies.track, *span(copies)) == (named(chapter, "BEGIN to COMMIT").track, *between(1.3, 1.4))
    assert dict(copies.args) == {"refreshed bytes": 7, "rebuilt bytes": 2}


def test_a_skipped_update_says_why(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.iteration(0, 1.0, upto=0.15)
        script.phase(1.16, "UPDATE", 0)
        script.at(1.17, events.UpdateSkipped(step=0, version=0, reason="a gradient is not finite"))
        script.phase(1.18, "IDLE", 0)
    (chapter,) = chapters(tmp_path / "journal.sqlite")
    assert dict(named(chapter, "update skipped").args) == {"skipped": "a gradient is not finite"}
    assert not [mark for mark in chapter.marks if mark.kind in {"drain", "writing", "optimizer"}]


def test_what_a_killed_run_left_open_ends_with_its_last_event_and_says_so(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.iteration(0, 1.0, upto=0.165)
    (chapter,) = chapters(tmp_path / "journal.sqlite")
    end_ns = ns(1.162)
    for name in ("iteration 0", "UPDATE", "update 0", "BEGIN to COMMIT"):
        mark = named(chapter, name)
        assert mark.end_ns == end_ns, name
        assert OPEN in mark.args, name
    assert ("weights", "poisoned: no COMMIT after this BEGIN") in named(chapter, "BEGIN to COMMIT").args
    assert OPEN not in named(chapter, "TRAIN").args
    assert not chapter.done


def test_groups_of_a_decode_unit_that_never_ended_are_told_all_the_same(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.iteration(0, 1.0, upto=0.061)
    (chapter,) = chapters(tmp_path / "journal.sqlite")
    assert named(chapter, "group 0 done").start_ns == ns(1.06)
    assert not chapter.of("generate")


def test_leases_are_sums_by_kind_and_a_range_begins_with_what_was_held_before(tmp_path: Path) -> None:
    told = chapters(run_of(tmp_path, 3), Steps(first=1, end=2))
    assert [chapter.step for chapter in told] == [1]
    at = ns(11.2)
    assert told[0].samples == [
        Sample(device="0:0", kind="actor_weights", at_ns=at, size_bytes=5_000),
        Sample(device="0:0", kind="rollout_kv", at_ns=at, size_bytes=0),
        Sample(device="0:0", kind="rollout_kv", at_ns=ns(11.215), size_bytes=1_000),
        Sample(device="0:0", kind="rollout_kv", at_ns=ns(11.301), size_bytes=0),
    ]
    assert chapters(tmp_path / "journal.sqlite", memory=False)[1].samples == []


def test_a_range_starts_and_ends_where_its_iterations_do(tmp_path: Path) -> None:
    (told,) = chapters(run_of(tmp_path, 3), Steps(first=1, end=2))
    times = [t for mark in told.marks for t in (mark.start_ns, mark.end_ns) if t is not None]
    assert (min(times), max(times)) == between(11.2, 11.4)
    assert [mark.name for mark in told.of("phase")] == ["IDLE", "ROLLOUT", "SCORE", "TRAIN", "UPDATE", "IDLE"]
    assert [OPEN in mark.args for mark in told.of("phase")] == [False] * 5 + [True]


def test_evaluations_and_checkpoints_are_named_by_the_events_within_their_phase(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.phase(1.0, "EVAL")
        script.at(1.0, events.EvalStarted(step=0, version=0, name="held_out", rows=8))
        script.at(2.0, events.EvalDone(step=0, version=0, name="held_out", metrics={"reward": 0.5, "kl": None}))
        script.phase(2.0, "CHECKPOINT")
        script.at(3.0, events.CheckpointSaved(step=7, version=7, folder="/run/checkpoints/step_7", size_bytes=9))
        script.phase(3.0, "EVAL")
        script.at(3.5, events.EvalStarted(step=7, version=7, name="blind", rows=8))
    (chapter,) = chapters(tmp_path / "journal.sqlite")
    held_out = named(chapter, "evaluation held_out")
    assert (held_out.track, *span(held_out)) == (marks.SAVES, *between(1.0, 2.0))
    assert dict(held_out.args) == {"rows": 8, "version": 0, "reward": 0.5}
    assert dict(named(chapter, "checkpoint of step 7").args)["bytes"] == 9
    assert OPEN in named(chapter, "evaluation blind").args


def test_errors_deaths_and_stops_are_moments_with_what_they_say(tmp_path: Path) -> None:
    error = ErrorReport(kind="WaitError", what="no answer", traceback="long")
    with JournalScript(tmp_path) as script:
        script.at(*started(1.0, Role.PREFIX))
        script.at(
            2.0,
            events.ServiceDied(
                service="prefix[0:0]", role=Role.PREFIX, incarnation=1, pid=2, how="killed by SIGKILL", phase="TRAIN"
            ),
        )
        script.at(2.1, events.ErrorRaised(error=error, phase="TRAIN", step=4, service="prefix[0:0]"))
        script.at(2.2, events.StopRequested(when=events.StopWhen.NOW, exit=True, source="SIGINT"))
        script.at(2.3, events.RunEnded(run="r", exit_code=1, reason="no answer"))
    (chapter,) = chapters(tmp_path / "journal.sqlite")
    assert {mark.track for mark in chapter.marks} == {marks.EVENTS}
    assert [mark.name for mark in chapter.marks] == [
        "prefix[0:0] started",
        "prefix[0:0] died: killed by SIGKILL",
        "error: WaitError in prefix[0:0]",
        "stop asked for by SIGINT",
        "run ends, exit code 1",
    ]
    assert dict(chapter.marks[2].args) == {
        "error.kind": "WaitError",
        "error.what": "no answer",
        "phase": "TRAIN",
        "step": 4,
        "service": "prefix[0:0]",
    }


def test_waits_for_memory_and_left_out_groups_are_moments(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.at(
            1.0,
            events.LeaseWaiting(kind=Kind.ACTOR_PREFIX_KV, owner="prefix", device=DEVICE, size_bytes=9, free_bytes=4),
        )
        script.at(2.0, events.GroupSkipped(step=0, group=3, row=5, function="right", problem="timed_out"))
    (chapter,) = chapters(tmp_path / "journal.sqlite")
    assert [(mark.track, mark.name) for mark in chapter.marks] == [
        (marks.WAITS, "actor_prefix_kv waits"),
        (marks.REWARDS, "group 3 left out"),
    ]


def test_a_run_that_goes_on_in_its_journal_holds_no_memory_of_the_process_before(tmp_path: Path) -> None:
    run_of(tmp_path, 2)
    with JournalScript(tmp_path) as script:
        script.iteration(2, 11.4, upto=0.05)
        script.start(20.0, resumed=True)
        script.iteration(2, 21.0)
    told = chapters(tmp_path / "journal.sqlite")
    assert [(chapter.step, chapter.done) for chapter in told][-2:] == [(2, False), (2, True)]
    cut = told[-2]
    assert OPEN in named(cut, "iteration 2").args
    assert [s.size_bytes for s in cut.samples if s.at_ns == ns(20.0)] == [0, 0]
    assert named(cut, "run digits-1 goes on").start_ns == ns(20.0)


def test_what_lies_before_the_last_boot_is_left_out_and_counted(tmp_path: Path) -> None:
    with Source(run_of(tmp_path, 2)) as source:
        before = len(list(source.records()))
    with JournalScript(tmp_path) as script:
        script.start(3.0, boot="boot-2", resumed=True)
        script.iteration(2, 4.0)
        script.start(7.0, boot="boot-2", resumed=True)
    with Source(tmp_path / "journal.sqlite") as source:
        told = list(source.chapters(Steps()))
        assert [chapter.step for chapter in told] == [None, 2]
        assert min(mark.start_ns for chapter in told for mark in chapter.marks) == ns(3.0)
        assert source.left_out == before > 50
        assert (source.first.wall_s, source.first.monotonic_s) == (WALL_S + 3.0, 3.0)
        assert source.steps == [2]


def test_a_missing_and_an_empty_journal_are_errors_that_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with pytest.raises(JournalError, match="no journal.*no file"):
        Source(path)
    path.touch()
    with pytest.raises(JournalError, match="no journal.*an empty file"):
        Source(path)
    path.unlink()
    JournalScript(tmp_path).close()
    with pytest.raises(JournalError, match="no event yet"):
        Source(path)
    path.write_bytes(b"no database" * 100)
    with pytest.raises(JournalError, match="cannot read"):
        Source(path)


def test_iterations_that_a_run_does_not_have_are_refused_with_those_it_has(tmp_path: Path) -> None:
    with Source(run_of(tmp_path, 3)) as source:
        assert source.require(Steps(first=2)) == [2]
        with pytest.raises(ConfigError, match="iterations 0 to 2"):
            source.require(Steps(first=3, end=9))


def test_a_run_without_iterations_is_told_up_to_where_it_came(tmp_path: Path) -> None:
    with JournalScript(tmp_path) as script:
        script.start(1.0)
        script.at(2.0, events.RunEnded(run="r", exit_code=2, reason="does not fit"))
    with Source(tmp_path / "journal.sqlite") as source:
        assert source.require(Steps()) == []
        (chapter,) = source.chapters(Steps())
    assert span(named(chapter, "LOAD")) == between(1.0, 2.0)
    assert STEP_S > 0
