"""The digest of the parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rollplex.errors import SegmentError
from rollplex.layout.parameters import HEADER_BYTES, ParameterTable, align
from rollplex.memory import Backend, Mapping
from rollplex.memory.digest import digest


@pytest.fixture
def mapping(memory: Backend, table: ParameterTable) -> Iterator[Mapping]:
    fd = memory.create(table.total_bytes, "weights")
    with memory.map(fd, table.total_bytes) as mapped:
        yield mapped
    os.close(fd)


def test_one_changed_bit_anywhere_after_the_header_changes_it(mapping: Mapping, table: ParameterTable) -> None:
    before = digest(mapping, table)
    padded = table.by_name("model.embed_tokens.weight")
    gap = next(entry for entry in table.entries if entry.size_bytes != align(entry.size_bytes))
    places = {
        "first parameter byte": HEADER_BYTES,
        "last byte": table.total_bytes - 1,
        "padding": padded.offset + padded.size_bytes - 1,
        "alignment gap": gap.offset + gap.size_bytes,
    }
    seen = {before}
    for offset in places.values():
        mapping.write(offset, b"\x01")
        seen.add(digest(mapping, table))
        mapping.write(offset, b"\x00")
    assert len(seen) == 1 + len(places)
    assert digest(mapping, table) == before
    assert len(bytes.fromhex(before)) == 32


def test_the_header_is_not_part_of_it(mapping: Mapping, table: ParameterTable) -> None:
    before = digest(mapping, table)
    mapping.write(0, b"\xff" * HEADER_BYTES)
    assert digest(mapping, table) == before


def test_it_is_of_the_table_too(mapping: Mapping, table: ParameterTable) -> None:
    other = replace(table, entries=(replace(table.entries[0], name="other"), *table.entries[1:]))
    assert digest(mapping, other) != digest(mapping, table)


def test_it_does_not_depend_on_the_mapping(memory: Backend, table: ParameterTable) -> None:
    digests = []
    for _ in range(2):
        fd = memory.create(table.total_bytes + 5000, "weights")
        with memory.map(fd, table.total_bytes + 5000) as mapping:
            mapping.write(HEADER_BYTES, b"the same parameters")
            mapping.write(table.total_bytes, os.urandom(5000))
            digests.append(digest(mapping, table))
        os.close(fd)
    assert digests[0] == digests[1]


def test_large_segments_are_read_in_parts_without_a_seam(
    memory: Backend, table: ParameterTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = memory.create(table.total_bytes, "weights")
    with memory.map(fd, table.total_bytes) as mapping:
        mapping.write(HEADER_BYTES, os.urandom(table.total_bytes - HEADER_BYTES))
        whole = digest(mapping, table)
        monkeypatch.setattr("rollplex.memory.digest._CHUNK_BYTES", 997)
        assert digest(mapping, table) == whole
    os.close(fd)


def test_a_segment_without_room_for_the_parameters_is_refused(memory: Backend, table: ParameterTable) -> None:
    size_bytes = table.total_bytes - 1
    fd = memory.create(size_bytes, "weights")
    with memory.map(fd, size_bytes) as mapping, pytest.raises(SegmentError, match="smaller"):
        digest(mapping, table)
    os.close(fd)
