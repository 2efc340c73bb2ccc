"""What holds for segments of every kind of memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from rollplex.errors import SegmentError
from rollplex.memory import Backend, backend
from rollplex.memory.fds import recv, send

SIZE_BYTES = 3 * 4096 + 17
StartOther: TypeAlias = Callable[[int, str], tuple[socket.socket, "subprocess.Popen[bytes]"]]


@pytest.fixture
def fd(memory: Backend) -> Iterator[int]:
    descriptor = memory.create(SIZE_BYTES, "test")
    yield descriptor
    os.close(descriptor)


def test_a_new_segment_has_exactly_its_size_and_is_zero_once_cleared(memory: Backend, fd: int) -> None:
    assert memory.size(fd) == SIZE_BYTES
    with memory.map(fd, SIZE_BYTES) as mapping:
        assert mapping.size_bytes == SIZE_BYTES
        assert mapping.read(0, SIZE_BYTES) == bytes(SIZE_BYTES)


def test_two_mappings_show_the_same_bytes(memory: Backend, fd: int) -> None:
    with memory.map(fd, SIZE_BYTES) as one, memory.map(fd, SIZE_BYTES) as two:
        one.write(4000, b"across a page border" * 10)
        assert two.read(4000, 200) == b"across a page border" * 10


def test_bytes_written_by_another_process_are_seen_and_the_other_way_round(
    memory: Backend, fd: int, other: StartOther
) -> None:
    sock, _ = other(
        fd,
        """
        mapping.write(5000, b"written there")
        send(sock, b"", [], 20.0)
        recv(sock, 20.0, 0, 0)
        send(sock, mapping.read(6000, 12), [], 20.0)
        """,
    )
    with memory.map(fd, SIZE_BYTES) as mapping:
        recv(sock, 20.0, 0, 0)
        assert mapping.read(5000, 13) == b"written there"
        mapping.write(6000, b"written here")
        send(sock, b"", [], 20.0)
        assert recv(sock, 20.0, 100, 0) == (b"written here", ())


def test_contents_survive_a_writer_that_is_killed_and_its_replacement_can_write(
    memory: Backend, fd: int, other: StartOther
) -> None:
    write_and_wait = """
        mapping.write(1000, mapping.read(1000, 2) + b"more")
        mapping.write(1000, {content!r})
        send(sock, b"", [], 20.0)
        signal.pause()
        """
    for content in (b"the first", b"the second"):
        sock, process = other(fd, write_and_wait.format(content=content))
        recv(sock, 20.0, 0, 0)
        process.send_signal(signal.SIGKILL)
        assert process.wait(20.0) == -signal.SIGKILL
        with memory.map(fd, SIZE_BYTES) as mapping:
            assert mapping.read(1000, len(content)) == content


def test_a_segment_survives_the_process_that_made_it(memory: Backend, fd: int, other: StartOther) -> None:
    sock, process = other(
        fd,
        """
        made = memory.create(size_bytes, "made there")
        memory.map(made, size_bytes).write(0, b"made there")
        send(sock, b"", [made], 20.0)
        signal.pause()
        """,
    )
    _, (made,) = recv(sock, 20.0, 0, 1)
    process.kill()
    process.wait(20.0)
    with memory.map(made, SIZE_BYTES) as mapping:
        assert mapping.read(0, 10) == b"made there"
    os.close(made)


def test_a_mapping_outlives_the_descriptor(memory: Backend) -> None:
    fd = memory.create(SIZE_BYTES, "test")
    with memory.map(fd, SIZE_BYTES) as mapping:
        os.close(fd)
        mapping.write(0, b"still here")
        assert mapping.read(0, 10) == b"still here"


def test_a_segment_of_another_size_is_not_mapped(memory: Backend, fd: int) -> None:
    for wrong in (SIZE_BYTES - 1, SIZE_BYTES + 1, 1, 0):
        with pytest.raises(SegmentError, match="another size") as caught:
            memory.map(fd, wrong)
        assert str(SIZE_BYTES) in caught.value.got
        assert str(wrong) in caught.value.needed


def test_the_size_of_a_segment_is_verified_before_it_is_mapped(memory: Backend, fd: int) -> None:
    memory.verify(fd)
    reader, writer = os.pipe()
    for strange in (reader, writer):
        with pytest.raises(SegmentError):
            memory.verify(strange)
        with pytest.raises(SegmentError):
            memory.map(strange, SIZE_BYTES)
        os.close(strange)
    with pytest.raises(SegmentError):
        memory.size(reader)


def test_an_impossible_request_is_refused_with_both_numbers(memory: Backend, open_fds: Callable[[], set[str]]) -> None:
    before = open_fds()
    with pytest.raises(SegmentError) as caught:
        memory.create(2**50, "too large")
    assert str(2**50) in caught.value.got
    assert caught.value.needed
    assert caught.value.do
    for size_bytes, name in ((0, "x"), (-1, "x"), (2**60, "x"), (8, ""), (8, "a\0b"), (8, "x" * 300)):
        with pytest.raises(SegmentError):
            memory.create(size_bytes, name)
    assert open_fds() == before


def test_accesses_outside_the_segment_are_refused(memory: Backend, fd: int) -> None:
    with memory.map(fd, SIZE_BYTES) as mapping:
        mapping.write(SIZE_BYTES - 3, b"end")
        for attempt in (
            lambda: mapping.read(SIZE_BYTES - 3, 4),
            lambda: mapping.read(-1, 1),
            lambda: mapping.read(0, -1),
            lambda: mapping.write(SIZE_BYTES, b"x"),
            lambda: mapping.load_word(SIZE_BYTES - 1),
            lambda: mapping.store_word(-8, 1),
        ):
            with pytest.raises(SegmentError, match="outside"):
                attempt()
        assert mapping.read(SIZE_BYTES - 3, 3) == b"end"


def test_words_are_whole_64_bit_numbers_at_aligned_offsets(memory: Backend, fd: int) -> None:
    with memory.map(fd, SIZE_BYTES) as mapping:
        for value in (0, 1, 2**63 + 5, 2**64 - 1):
            mapping.store_word(4096, value)
            assert mapping.load_word(4096) == value
        assert mapping.read(4088, 24) == bytes(8) + b"\xff" * 8 + bytes(8)
        with pytest.raises(SegmentError, match="aligned"):
            mapping.load_word(4097)
        with pytest.raises(SegmentError, match="aligned"):
            mapping.store_word(4100, 1)


def test_a_closed_mapping_refuses_every_access_and_may_be_closed_again(memory: Backend, fd: int) -> None:
    mapping = memory.map(fd, SIZE_BYTES)
    closed = [mapping.closed]
    mapping.close()
    mapping.close()
    assert [*closed, mapping.closed] == [False, True]
    for attempt in (
        lambda: mapping.read(0, 1),
        lambda: mapping.write(0, b"x"),
        lambda: mapping.load_word(0),
        lambda: mapping.store_word(0, 1),
        lambda: mapping.view(0, 1),
        lambda: mapping.buffer,
    ):
        with pytest.raises(SegmentError, match="unmapped"):
            attempt()


def test_mapping_and_closing_leave_no_descriptor(memory: Backend, open_fds: Callable[[], set[str]]) -> None:
    before = open_fds()
    for _ in range(3):
        fd = memory.create(SIZE_BYTES, "test")
        memory.map(fd, SIZE_BYTES).close()
        with pytest.raises(SegmentError):
            memory.map(fd, 1)
        os.close(fd)
    assert open_fds() == before


def test_clearing_makes_every_byte_zero(memory: Backend, fd: int) -> None:
    with memory.map(fd, SIZE_BYTES) as mapping:
        mapping.write(0, b"\xff" * SIZE_BYTES)
        mapping.clear()
        assert mapping.read(0, SIZE_BYTES) == bytes(SIZE_BYTES)
    with pytest.raises(SegmentError, match="unmapped"):
        mapping.clear()


def test_each_kind_of_memory_refuses_the_other_s_views(memory: Backend, fd: int) -> None:
    with memory.map(fd, SIZE_BYTES) as mapping:
        look = mapping.device_view if memory.name == "host" else mapping.view
        assert mapping.memory == memory.name
        with pytest.raises(SegmentError, match="can look at"):
            look(0, 1)


def test_an_unknown_kind_of_memory_is_named() -> None:
    with pytest.raises(SegmentError, match="punch cards"):
        backend("punch cards")
