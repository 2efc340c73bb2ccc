from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.errors import JournalError
from rollplex.journal.reader import Reader
from rollplex_coordinator.archive import timeline
from rollplex_coordinator.archive.timeline import Timeline, read_timeline
from support.past_runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a", steps=5)


def boxes(found: Timeline, lane: str) -> list[tuple[str, float, float | None]]:
    (spans,) = [one.spans for one in found.lanes if one.name == lane]
    return [(span.kind, round(span.start_s, 6), None if span.end_s is None else round(span.end_s, 6)) for span in spans]


def test_the_last_iterations_are_shown_where_none_is_named(run: Path) -> None:
    found = read_timeline(run, None, 2)
    assert (found.steps, found.first_step, found.last_step) == ([3, 4], 0, 4)


def test_an_iteration_is_lanes_of_spans_from_its_beginning(run: Path) -> None:
    found = read_timeline(run, 1, 1)
    assert found.steps == [1]
    assert boxes(found, "trainer[0:0]") == [("suffix", 0.5, 0.7), ("optimizer", 0.8, 0.9)]
    assert boxes(found, "rewards") == [("reward", 0.26, 0.3)]
    assert boxes(found, "prefix[0:0]") == [("actor_prefix", 0.05, 0.2), ("score", 0.3, 0.4)]
    assert [(span.name, round(span.start_s, 6)) for span in found.phases][:4] == [
        ("ROLLOUT", 0.0),
        ("SCORE", 0.25),
        ("TRAIN", 0.5),
        ("UPDATE", 0.75),
    ]


def test_a_decode_unit_is_drawn_as_prefill_and_decode_not_a_second_time(run: Path) -> None:
    assert boxes(read_timeline(run, 2, 1), "rollout[0:0]") == [
        ("prefill", 0.0, 0.1),
        ("decode", 0.1, 0.25),
        ("group_finished", 0.2, None),
    ]


def test_no_more_iterations_than_asked_for_nor_than_there_are(run: Path) -> None:
    assert read_timeline(run, 3, 10).steps == [3, 4]
    assert read_timeline(run, 9, 2).steps == []
    assert read_timeline(run, 0, 2).steps == [0, 1]


def test_what_is_too_much_is_cut_and_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 5)
    found = read_timeline(run, 0, 3)
    assert found.cut
    assert len(found.phases) + sum(len(lane.spans) for lane in found.lanes) == 5
    monkeypatch.setattr(timeline, "MAX_SPANS", 10_000)
    monkeypatch.setattr(timeline, "MAX_ROWS", 4)
    assert read_timeline(run, 0, 3).cut


def test_a_run_without_a_journal_is_told(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal"):
        read_timeline(tmp_path, None, 2)


def test_rows_that_are_left_out_are_said_even_where_whole_parts_fill_the_limit(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reader(run / "journal.sqlite") as reader:
        rows = len(reader.rows_after(0, 10_000))
        begin = reader.start_of(0)
    monkeypatch.setattr(timeline, "PART_ROWS", 5)
    monkeypatch.setattr(timeline, "MAX_ROWS", 10)
    assert read_timeline(run, 0, 5).cut
    monkeypatch.setattr(timeline, "MAX_ROWS", rows - begin + 1)
    assert not read_timeline(run, 0, 5).cut
