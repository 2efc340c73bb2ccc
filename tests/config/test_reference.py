"""docs/configuration.md is what the sections say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from rollplex.config import Config
from rollplex.config.reference import _section, main, reference

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            yield f"{prefix}{name}"
        else:
            yield from leaves(section, f"{prefix}{name}.")


def test_the_document_is_the_one_that_the_sections_make() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == reference(), "run: python -m rollplex.config.reference docs/configuration.md"


def test_every_key_has_a_row_with_kind_default_and_sentence() -> None:
    rows = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    keys = {row[0].removeprefix("| ").strip("`") for row in rows}
    assert set(leaves(Config)) <= keys
    assert len(rows) > 90
    for row in rows:
        assert len(row) == 4, row
        assert row[1].strip(), row
        assert row[3].removesuffix(" |").strip(), row


@pytest.mark.parametrize(
    "row",
    [
        r"\| `run.seed` \| whole number, ≥ 0 < 2\^53 \| `0` \|",
        r"\| `memory.budget` \| bytes, such as `\"8GiB\"` \|  \|",
        r"\| `run.schedule` \| `serial`, `overlap`, `stream` \| `\"overlap\"` \|",
        r"\| `model.path` \| path \| required \|",
        r"\| `rewards.functions` \| list of mapping \| required \|",
        r"\| `optimizer.lr` \| number, ≥ 0 \| `1e-06` \|",
        r"\| `services.rollout` \| list of text \|  \|",
    ],
)
def test_kinds_bounds_and_defaults_are_said(row: str) -> None:
    assert re.search(f"^{row}", reference(), re.MULTILINE)


def test_the_command_writes_the_file_it_is_given(tmp_path: Path) -> None:
    assert main([str(tmp_path / "out.md")]) == 0
    assert (tmp_path / "out.md").read_text(encoding="utf-8") == reference()
    assert main([]) == 2
