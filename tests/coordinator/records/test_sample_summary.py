"""Samples as Markdown: a table stays a table, and a text means nothing."""

from __future__ import annotations

import html
import re

from msgspec.structs import replace

from rollplex_coordinator.records.sample_summary import MAX_RESPONSE, MAX_RESPONSES, escaped, markdown
from support.files import sample_response, sample_table

EVIL = "<script>alert(1)</script> | ![x](http://example.com/a.png) **b** `c` [l](javascript:d) &lt; \\| _e_ #"


def test_a_text_has_no_character_that_means_something_and_comes_back() -> None:
    text = escaped(EVIL, 1000)
    assert set(re.sub(r"&#\d+;", "", text)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ")
    assert html.unescape(text) == EVIL


def test_every_line_of_the_table_has_the_same_number_of_cells() -> None:
    table = sample_table(f"{EVIL}\nsecond line", prompt=EVIL)
    lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
    assert len(lines) == 3
    assert {line.count("|") for line in lines} == {6}
    assert lines[0] == "| response | advantage | reward | right | tokens |"
    assert lines[2].endswith("⏎second line | none | 0.5 | 1 | 2 |")


def test_long_texts_and_large_groups_are_cut_and_what_is_missing_says_why() -> None:
    table = sample_table("")
    (group,) = table.groups
    many = replace(group, responses=tuple(sample_response("x" * 1000) for _ in range(40)))
    missing, skipped = replace(group, missing="no such row"), replace(group, skipped="it raised", responses=())
    text = markdown(replace(table, groups=(many, missing, skipped)))
    assert text.count("x" * MAX_RESPONSE) == MAX_RESPONSES
    assert "x" * (MAX_RESPONSE + 1) not in text
    assert "*not shown:* no such row" in text
    assert "*skipped:* it raised" in text


def test_what_turns_a_line_around_is_left_out() -> None:
    assert escaped("a\u202eb\u200bc\x00d", 100) == "abcd"
