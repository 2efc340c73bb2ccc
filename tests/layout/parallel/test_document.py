"""docs/layouts.md says what the plans say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.layout.parallel.document import BEGIN, END, main, updated

DOCUMENT = Path(__file__).parents[3] / "docs" / "layouts.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_the_tables_in_the_document_are_those_that_the_plans_make() -> None:
    assert updated(TEXT) == TEXT, "run: python -m rollplex.layout.parallel.document docs/layouts.md"


def test_every_pair_of_every_model_has_a_row_or_its_refusal() -> None:
    rows = [line.split("|")[1:-1] for line in TEXT.split(BEGIN)[1].split(END)[0].splitlines() if line.startswith("| ")]
    assert len(rows) == 4 * (1 + 16)
    assert sum("refused" in row[2] for row in rows) == 7
    assert all("28 attention heads / 8 = 3.5" in row[2] for row in rows if "refused" in row[2])
    assert {len(row) for row in rows} == {10}


def test_the_command_wants_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "docs/layouts.md" in capsys.readouterr().err
