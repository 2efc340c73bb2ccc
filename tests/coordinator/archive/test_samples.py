from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.errors import JournalError
from rollplex_coordinator.archive import samples
from rollplex_coordinator.archive.samples import Wanted, picture, search
from support.past_runs import PNG, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a", sampled=(0, 5, 10, 100))


def rows(run: Path, wanted: Wanted, limit: int = 100) -> list[tuple[int, int]]:
    return [(hit.step, hit.group.row) for hit in search(run, wanted, limit=limit).hits]


def test_everything_is_found_newest_first(run: Path) -> None:
    assert [step for step, _ in rows(run, Wanted())] == [100, 100, 10, 10, 5, 5, 0, 0]


def test_a_row_and_a_range_of_steps_narrow_it(run: Path) -> None:
    assert rows(run, Wanted(row=51)) == [(5, 51)]
    assert rows(run, Wanted(step_from=5, step_to=10)) == [(10, 100), (10, 101), (5, 50), (5, 51)]
    assert rows(run, Wanted(row=7)) == []


def test_a_range_of_rewards_keeps_only_responses_inside_it(run: Path) -> None:
    (hit,) = search(run, Wanted(row=0, reward_from=0.4, reward_to=0.9), limit=10).hits
    assert [item.reward for item in hit.group.responses] == [0.5]
    assert rows(run, Wanted(reward_from=2.0)) == []


def test_a_response_without_a_reward_is_found_only_where_none_is_asked_for(run: Path) -> None:
    (hit,) = search(run, Wanted(row=0), limit=10).hits
    assert [item.reward for item in hit.group.responses] == [0.0, 0.5, 1.0, None]
    (hit,) = search(run, Wanted(row=0, reward_from=-1e9), limit=10).hits
    assert [item.reward for item in hit.group.responses] == [0.0, 0.5, 1.0]


def test_a_search_that_stops_says_where_to_go_on_and_nothing_is_lost_or_doubled(run: Path) -> None:
    found: list[tuple[int, int]] = []
    step_to: int | None = None
    while True:
        page = search(run, Wanted(step_to=step_to), limit=3)
        found += [(hit.step, hit.group.row) for hit in page.hits]
        step_to = page.next_step_to
        if step_to is None:
            break
    assert found == rows(run, Wanted())


def test_one_answer_reads_a_bounded_number_of_tables(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_TABLES", 2)
    page = search(run, Wanted(row=1), limit=10)
    assert (page.hits, page.looked_at, page.next_step_to) == ([], 2, 5)
    monkeypatch.setattr(samples, "MAX_TABLES", 200)
    monkeypatch.setattr(samples, "MAX_READ_BYTES", 1)
    assert search(run, Wanted(row=1), limit=10).looked_at == 1


def test_a_picture_is_given_and_what_is_none_is_not(run: Path) -> None:
    assert picture(run, 5, 1, 0) == PNG
    for step, group, index in [(5, 1, 1), (5, 1, 2), (5, 2, 0), (6, 0, 0)]:
        assert picture(run, step, group, index) is None


def test_a_table_that_is_too_large_or_not_ours_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "a", sampled=(0,))
    monkeypatch.setattr(samples, "MAX_TABLE_BYTES", 100)
    with pytest.raises(JournalError, match="too large"):
        search(folder, Wanted(), limit=1)
    (folder / "samples" / "step_0.json").write_text("{}")
    with pytest.raises(JournalError, match="step_0.json"):
        search(folder, Wanted(), limit=1)


def test_links_and_other_files_are_no_tables(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", sampled=(0,))
    (folder / "samples" / "step_1.json").symlink_to("step_0.json")
    (folder / "samples" / ".step_2.json.new").write_text("{}")
    assert search(folder, Wanted(), limit=9).tables == 1
    assert search(tmp_path, Wanted(), limit=9).tables == 0
