"""Marks as begins and ends that nest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollplex.trace.lanes import Edge, Lane, Turn, arrange
from rollplex.trace.marks import Mark


def mark(name: str, start_ns: int, end_ns: int | None = None) -> Mark:
    return Mark(track="t", name=name, kind="k", start_ns=start_ns, end_ns=end_ns)


def told(turns: list[Turn]) -> str:
    signs = {Edge.BEGIN: "(", Edge.END: ")", Edge.MOMENT: "!"}
    return " ".join(f"{signs[turn.edge]}{turn.mark.name}{turn.at_ns}" for turn in turns)


def test_marks_inside_others_nest_and_neighbours_follow_each_other() -> None:
    (turns,) = arrange([mark("b", 0, 4), mark("unit", 0, 9), mark("c", 4, 9), mark("next", 9, 12)], [])
    assert told(turns) == "(unit0 (b0 )b4 (c4 )c9 )unit9 (next9 )next12"


def test_a_moment_at_the_end_of_a_mark_still_lies_in_it() -> None:
    (turns,) = arrange([mark("unit", 0, 9), mark("last", 9), mark("first", 0)], [])
    assert told(turns) == "(unit0 !first0 !last9 )unit9"


def test_marks_that_cross_get_lanes_of_their_own() -> None:
    first, second = arrange([mark("a", 0, 5), mark("b", 3, 8), mark("c", 6, 7)], [])
    assert told(first) == "(a0 )a5 (c6 )c7"
    assert told(second) == "(b3 )b8"


def test_a_lane_never_goes_back_behind_what_an_earlier_chapter_wrote() -> None:
    lanes: list[Lane] = []
    arrange([mark("a", 0, 5)], lanes)
    first, second = arrange([mark("late", 4, 9), mark("after", 5, 6)], lanes)
    assert told(first) == "(after5 )after6"
    assert told(second) == "(late4 )late9"


SPANS = st.tuples(st.integers(0, 30), st.none() | st.integers(0, 12))


@given(st.lists(st.lists(SPANS, max_size=12), max_size=3))
def test_whatever_the_marks_every_lane_nests_and_nothing_is_lost(chapters: list[list[tuple[int, int | None]]]) -> None:
    lanes: list[Lane] = []
    written: dict[int, list[Turn]] = {}
    given_marks: list[Mark] = []
    for chapter in chapters:
        marks = [mark("m", start, None if size is None else start + size) for start, size in chapter]
        given_marks += marks
        for index, turns in enumerate(arrange(marks, lanes)):
            written.setdefault(index, []).extend(turns)
    for turns in written.values():
        assert [turn.at_ns for turn in turns] == sorted(turn.at_ns for turn in turns)
        open_marks: list[Mark] = []
        for turn in turns:
            if turn.edge is Edge.BEGIN:
                open_marks.append(turn.mark)
            elif turn.edge is Edge.END:
                assert open_marks.pop() is turn.mark
                assert turn.at_ns == turn.mark.end_ns
        assert not open_marks
    begun = [id(t.mark) for turns in written.values() for t in turns if t.edge is not Edge.END]
    assert sorted(begun) == sorted(id(m) for m in given_marks)
