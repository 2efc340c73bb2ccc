"""docs/protocol.md says what the structs say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollplex.protocol import reference
from rollplex.protocol.codec import CHANNELS, FROM_HOLDER, TO_HOLDER, Codec
from rollplex.protocol.common import Role
from rollplex.protocol.reference import BEGIN, MODULES, entries, main, updated
from rollplex.protocol.schema import schema_hash

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
PROSE = TEXT.split(BEGIN)[0]
CODECS: list[Codec[Any]] = [c for channel in CHANNELS.values() for c in (channel.to_worker, channel.from_worker)]
MESSAGES = sorted(
    {kind for codec in (*CODECS, TO_HOLDER, FROM_HOLDER) for kind in codec.types}, key=lambda x: x.__name__
)


def test_the_reference_in_the_document_is_the_one_that_the_structs_make() -> None:
    assert updated(TEXT) == TEXT, "run: python -m rollplex.protocol.reference docs/protocol.md"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_message_is_explained_in_the_prose_and_has_a_section(message: type[msgspec.Struct]) -> None:
    assert f"`{message.__name__}" in PROSE or f"{message.__name__}(" in PROSE
    assert f"#### `{message.__name__}`" in TEXT


@pytest.mark.parametrize("name", MODULES)
def test_every_message_says_above_it_who_sends_it_to_whom(name: str) -> None:
    for entry in entries(importlib.import_module(f"rollplex.protocol.{name}")):
        if entry.kind in MESSAGES:
            assert " -> " in entry.comment, entry.kind.__name__


def test_comments_and_the_texts_of_fields_reach_the_reference() -> None:
    assert "coordinator -> rollout: sample these prompts together, in this one decode batch" in TEXT
    row = "| `top_k` | count, default `0` | 0 is off. |"
    assert row in TEXT
    assert "| `media` | array of MediaSlot ≤ 1024, default `[]` |" in TEXT


def test_the_command_rewrites_the_reference_and_leaves_the_prose(tmp_path: Path) -> None:
    copy = tmp_path / "protocol.md"
    copy.write_text(TEXT.replace("#### `Hello`", "#### `Goodbye`"), encoding="utf-8")
    assert main([str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == TEXT


def test_the_command_prints_the_hashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hashes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [[role.value, schema_hash(role)] for role in Role]
    assert main([]) == 2
    assert reference.END in TEXT
