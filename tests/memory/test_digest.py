"""The digest of the parameters."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rollplex.errors import SegmentError
from rollplex.layout.parameters import HEADER_BYTES, ParameterTable, align
from rollplex.memory import Backend, Mapping
from rollplex.memory.digest import TableDigest, digest, host_lanes, seal
from rollplex.memory.digest_device import lanes


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


def slow_digest(content: bytes, table_hash: str) -> str:
    """The definition, word by word."""
    mask, golden, lanes = 2**64 - 1, 0x9E3779B97F4A7C15, [0, 0]
    words = [int.from_bytes(content[n : n + 8], "little") for n in range(0, len(content), 8)]
    for index, word in enumerate(words):
        key = (2 * index + 1) * golden & mask
        mixed = (word + key) & mask
        for _ in range(2):
            mixed ^= mixed >> 32
            mixed = mixed * 0xD6E8FEB86659FD93 & mask
        mixed ^= mixed >> 32
        lanes = [(lanes[0] + mixed) & mask, (lanes[1] + mixed * key) & mask]
    numbers = struct.pack("<QQQ", len(words), *lanes)
    return hashlib.blake2b(b"rollplex digest 2" + bytes.fromhex(table_hash) + numbers, digest_size=32).hexdigest()


def test_it_is_what_its_definition_says(mapping: Mapping, table: ParameterTable) -> None:
    content = random.Random(3).randbytes(table.total_bytes - HEADER_BYTES)
    mapping.write(HEADER_BYTES, content)
    assert digest(mapping, table) == slow_digest(content, table.hash)


@pytest.mark.parametrize("size_bytes", [0, 1, 7, 8, 9, 800, 8 * 997, 8 * 997 * 3 + 5])
def test_hosts_and_torch_find_the_same_in_parts_of_any_size(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(size_bytes).randbytes(size_bytes)
    seen = set()
    for words in (1, 100, 997, 2**15):
        monkeypatch.setattr("rollplex.memory.digest._CHUNK_WORDS", words)
        seen.add(host_lanes(content))
        seen.add(lanes(torch.tensor(list(content), dtype=torch.uint8), words))
    (found,) = seen
    assert seal("ab" * 32, -(-size_bytes // 8), found) == slow_digest(content, "ab" * 32)


def test_words_that_swap_places_and_signs_that_change_in_pairs_are_seen() -> None:
    content = bytearray(random.Random(5).randbytes(4096))
    seen = {host_lanes(bytes(content))}
    for one, two in ((0, 8), (8, 4088), (1024, 1032)):
        swapped = bytearray(content)
        swapped[one : one + 8], swapped[two : two + 8] = content[two : two + 8], content[one : one + 8]
        signs = bytearray(content)
        signs[one + 7] ^= 0x80
        signs[two + 7] ^= 0x80
        seen |= {host_lanes(bytes(swapped)), host_lanes(bytes(signs))}
    assert len(seen) == 7


def test_zeros_at_the_end_count() -> None:
    assert len({seal("ab" * 32, n, host_lanes(bytes(8 * n))) for n in range(5)}) == 5


def test_of_one_device_among_several_it_is_over_the_segments_own_size(memory: Backend, table: ParameterTable) -> None:
    content = random.Random(7).randbytes(1000 * 256 - HEADER_BYTES)
    fd = memory.create(HEADER_BYTES + len(content), "weights")
    with memory.map(fd, HEADER_BYTES + len(content)) as mapping:
        mapping.write(HEADER_BYTES, content)
        assert digest(mapping, table, HEADER_BYTES + len(content)) == slow_digest(content, table.hash)
        with pytest.raises(SegmentError, match="smaller"):
            digest(mapping, table, HEADER_BYTES + len(content) + 256)
    os.close(fd)


def test_entries_given_one_after_the_other_have_the_digest_of_the_segment(
    mapping: Mapping, table: ParameterTable
) -> None:
    draw = random.Random(9)
    for entry in table.entries:
        mapping.write(entry.offset, draw.randbytes(entry.size_bytes))
    running = TableDigest(table)
    for entry in table.entries:
        running.add(mapping.read(entry.offset, entry.size_bytes))
    assert running.result() == digest(mapping, table)


def test_an_entry_of_another_size_or_one_that_is_missing_is_no_digest(table: ParameterTable) -> None:
    running = TableDigest(table)
    with pytest.raises(SegmentError, match="another size"):
        running.add(bytes(table.entries[0].size_bytes + 1))
    running.add(bytes(table.entries[0].size_bytes))
    with pytest.raises(AssertionError, match=f"1 of {len(table.entries)} entries"):
        running.result()


def test_a_segment_without_room_for_the_parameters_is_refused(memory: Backend, table: ParameterTable) -> None:
    size_bytes = table.total_bytes - 1
    fd = memory.create(size_bytes, "weights")
    with memory.map(fd, size_bytes) as mapping, pytest.raises(SegmentError, match="smaller"):
        digest(mapping, table)
    os.close(fd)
