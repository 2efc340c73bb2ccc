"""Tables of texts."""

from __future__ import annotations

from rollplex.bench.tables import Table, markdown, plain

TABLE = Table(head=("mode", "s"), rows=(("serial", "1.00"), ("a", "10.00")))


def test_plain_columns_are_aligned_the_first_to_the_left() -> None:
    assert plain(TABLE) == ["mode        s", "serial   1.00", "a       10.00"]


def test_markdown_says_the_alignment_in_its_rule() -> None:
    assert markdown(TABLE) == ["| mode | s |", "| --- | ---: |", "| serial | 1.00 |", "| a | 10.00 |"]
