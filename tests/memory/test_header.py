"""The header page: what readers can see, and what no reader can ever see."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn, Self, TypeAlias

import pytest

from rollplex.errors import RollplexError, SegmentError, StaleWeightsError
from rollplex.layout.parameters import HEADER_BYTES
from rollplex.memory import Backend, Mapping
from rollplex.memory import header as header_module
from rollplex.memory.fds import recv, send
from rollplex.memory.header import Header, HeaderPage, State
from rollplex.protocol.common import Memory

SIZE_BYTES = HEADER_BYTES + 100
RUN = "run-2b"
TABLE = "ab" * 32
StartOther: TypeAlias = Callable[[int, str], tuple[socket.socket, "subprocess.Popen[bytes]"]]


def digest_of(version: int) -> str:
    return hashlib.sha256(str(version).encode()).hexdigest()


@pytest.fixture
def fd(memory: Backend) -> Iterator[int]:
    descriptor = memory.create(SIZE_BYTES, "weights")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def mapping(memory: Backend, fd: int) -> Iterator[Mapping]:
    with memory.map(fd, SIZE_BYTES) as mapped:
        yield mapped


@pytest.fixture
def page(mapping: Mapping) -> HeaderPage:
    return HeaderPage(mapping, run_id=RUN, table_hash=TABLE)


def header(state: State, version: int, digest_version: int) -> Header:
    return Header(state=state, version=version, run_id=RUN, table_hash=TABLE, digest=digest_of(digest_version))


def test_a_new_segment_is_not_readable(page: HeaderPage) -> None:
    for attempt in (page.read, lambda: page.require(0), lambda: page.begin_update(0), page.poison):
        with pytest.raises(SegmentError, match="does not hold weights") as caught:
            attempt()
        assert "EMPTY" in caught.value.got
        assert "rollplex weights" in caught.value.needed


def test_the_life_of_a_version(page: HeaderPage, memory: Backend, fd: int) -> None:
    with memory.map(fd, SIZE_BYTES) as theirs:
        reader = HeaderPage(theirs, run_id=RUN, table_hash=TABLE)
        page.initialise(7, digest_of(7))
        assert reader.read() == reader.require(7) == header(State.STABLE, 7, 7)
        page.begin_update(7)
        assert reader.read() == header(State.UPDATING, 7, 7)
        page.publish(8, digest_of(8))
        assert reader.read() == reader.require(8) == header(State.STABLE, 8, 8)
        page.poison()
        assert reader.read() == header(State.POISONED, 8, 8)
        page.initialise(3, digest_of(3))
        assert reader.require(3) == header(State.STABLE, 3, 3)


def test_weights_that_are_changing_poisoned_or_of_another_version_are_not_given_out(page: HeaderPage) -> None:
    page.initialise(7, digest_of(7))
    for version in (6, 8):
        with pytest.raises(StaleWeightsError) as caught:
            page.require(version)
        assert caught.value.got == "version 7, STABLE"
        assert caught.value.needed == f"version {version}, STABLE"
    page.begin_update(7)
    with pytest.raises(StaleWeightsError, match="version 7, UPDATING"):
        page.require(7)
    page.poison()
    with pytest.raises(StaleWeightsError, match="version 7, POISONED.*checkpoint"):
        page.require(7)


def test_no_version_is_skipped_or_used_twice(page: HeaderPage) -> None:
    page.initialise(7, digest_of(7))
    with pytest.raises(SegmentError, match="published as version 8"):
        page.publish(8, digest_of(8))
    with pytest.raises(StaleWeightsError):
        page.begin_update(6)
    page.begin_update(7)
    for version in (6, 7, 9):
        with pytest.raises(SegmentError, match=f"published as version {version}"):
            page.publish(version, digest_of(version))
    with pytest.raises(StaleWeightsError):
        page.begin_update(7)
    page.publish(8, digest_of(8))
    with pytest.raises(StaleWeightsError):
        page.begin_update(7)


def test_weights_in_use_are_not_initialised_again(page: HeaderPage) -> None:
    page.initialise(7, digest_of(7))
    with pytest.raises(SegmentError, match="initialised now"):
        page.initialise(7, digest_of(7))
    page.begin_update(7)
    with pytest.raises(SegmentError, match="initialised now"):
        page.initialise(7, digest_of(7))


@pytest.mark.parametrize(("run_id", "table_hash"), [("other run", TABLE), (RUN, "cd" * 32)])
def test_weights_of_another_run_or_table_are_refused_with_both_values(
    mapping: Mapping, page: HeaderPage, run_id: str, table_hash: str
) -> None:
    HeaderPage(mapping, run_id=run_id, table_hash=table_hash).initialise(7, digest_of(7))
    for attempt in (page.read, lambda: page.require(7), lambda: page.begin_update(7), page.poison):
        with pytest.raises(StaleWeightsError) as caught:
            attempt()
        assert (caught.value.got, caught.value.needed) in ((run_id, RUN), (table_hash, TABLE))
    HeaderPage(mapping, run_id=run_id, table_hash=table_hash).poison()
    with pytest.raises(StaleWeightsError):
        page.initialise(7, digest_of(7))


def test_what_is_no_header_is_refused(mapping: Mapping, page: HeaderPage) -> None:
    page.initialise(7, digest_of(7))
    mapping.write(0, b"something else!!")
    with pytest.raises(SegmentError, match="something else"):
        page.read()
    page_of_noise = bytes(range(1, 256)) * 16
    mapping.write(0, page_of_noise)
    with pytest.raises(SegmentError):
        page.read()


def test_ids_and_hashes_of_another_form_are_refused(memory: Backend, mapping: Mapping, page: HeaderPage) -> None:
    for run_id in ("", "x" * 65, "a\0b"):
        with pytest.raises(SegmentError, match="run id"):
            HeaderPage(mapping, run_id=run_id, table_hash=TABLE)
    for text in ("", "abc", "zz" * 32, TABLE + "00"):
        with pytest.raises(SegmentError, match="hash"):
            HeaderPage(mapping, run_id=RUN, table_hash=text)
        with pytest.raises(SegmentError, match="hash"):
            page.initialise(0, text)
    for version in (-1, 2**53 + 1):
        with pytest.raises(SegmentError, match="version"):
            page.initialise(version, digest_of(0))
    with pytest.raises(SegmentError):
        page.read()
    small = memory.create(HEADER_BYTES - 1, "small")
    with memory.map(small, HEADER_BYTES - 1) as no_room, pytest.raises(SegmentError, match="room"):
        HeaderPage(no_room, run_id=RUN, table_hash=TABLE)
    os.close(small)


def test_the_longest_run_id_and_the_largest_version_come_back(mapping: Mapping) -> None:
    page = HeaderPage(mapping, run_id="ü" * 32, table_hash=TABLE.upper())
    page.initialise(2**53 - 1, digest_of(1))
    page.begin_update(2**53 - 1)
    page.publish(2**53, digest_of(2))
    assert page.require(2**53).run_id == "ü" * 32


class Dying:
    """A mapping whose writer dies before its store number `stores`; loads go on."""

    def __init__(self, mapping: Mapping, stores: int) -> None:
        self._mapping = mapping
        self._left = stores

    memory = Memory.HOST
    size_bytes = SIZE_BYTES
    closed = False

    @property
    def buffer(self) -> memoryview:
        raise NotImplementedError

    def view(self, offset: int, size_bytes: int) -> memoryview:
        raise NotImplementedError

    def device_view(self, offset: int, size_bytes: int) -> NoReturn:
        raise NotImplementedError

    def read(self, offset: int, size_bytes: int) -> bytes:
        return self._mapping.read(offset, size_bytes)

    def load_word(self, offset: int) -> int:
        return self._mapping.load_word(offset)

    def write(self, offset: int, content: bytes) -> None:
        self._count()
        self._mapping.write(offset, content)

    def store_word(self, offset: int, value: int) -> None:
        self._count()
        self._mapping.store_word(offset, value)

    def clear(self) -> None:
        raise NotImplementedError

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def _count(self) -> None:
        if not self._left:
            raise _Death
        self._left -= 1


class _Death(Exception):  # noqa: N818 - no error of the code under test
    pass


def seen_after_death(mapping: Mapping, page: HeaderPage, change: Callable[[HeaderPage], None]) -> list[Header | None]:
    """What a reader finds if the writer dies before its first, second, … store of `change`, and after the last."""
    before = mapping.read(0, HEADER_BYTES)
    seen: list[Header | None] = []
    for stores in range(20):
        mapping.write(0, before)
        try:
            change(HeaderPage(Dying(mapping, stores), run_id=RUN, table_hash=TABLE))
        except _Death:
            finished = False
        else:
            finished = True
        try:
            seen.append(page.read())
        except RollplexError:
            seen.append(None)
        if finished:
            return seen
    raise AssertionError("never finished")


def test_a_writer_that_dies_while_publishing_leaves_the_old_state_to_the_last_store(
    mapping: Mapping, page: HeaderPage
) -> None:
    page.initialise(7, digest_of(7))
    page.begin_update(7)
    seen = seen_after_death(mapping, page, lambda dying: dying.publish(8, digest_of(8)))
    *before, after = seen
    assert len(before) > 1
    assert {(h.state, h.version) for h in before if h} == {(State.UPDATING, 7)}
    assert after == header(State.STABLE, 8, 8)


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_writer_that_dies_while_initialising_leaves_nothing_readable(
    mapping: Mapping, page: HeaderPage, poisoned: bool
) -> None:
    if poisoned:
        page.initialise(9, digest_of(9))
        page.poison()
    seen = seen_after_death(mapping, page, lambda dying: dying.initialise(7, digest_of(7)))
    *before, after = seen
    assert len(before) > 4
    assert {h and h.state for h in before} == {State.POISONED if poisoned else None}
    assert after == header(State.STABLE, 7, 7)


def test_a_reader_in_another_process_never_sees_a_version_with_another_digest_or_state(
    memory: Backend, fd: int, mapping: Mapping, page: HeaderPage, other: StartOther
) -> None:
    page.initialise(0, digest_of(0))
    sock, _ = other(
        fd,
        f"""
        import hashlib
        from rollplex.memory.header import HeaderPage
        page = HeaderPage(mapping, run_id={RUN!r}, table_hash={TABLE!r})
        digests = [hashlib.sha256(str(version).encode()).hexdigest() for version in range(2001)]
        send(sock, b"", [], 20.0)
        for version in range(2000):
            page.begin_update(version)
            page.publish(version + 1, digests[version + 1])
        signal.pause()
        """,
    )
    recv(sock, 20.0, 0, 0)
    digests = [digest_of(version) for version in range(2001)]
    last = 0
    while last < 2000:
        seen = page.read()
        assert seen.version >= last
        last = seen.version
        if seen.state is State.STABLE:
            assert seen.digest == digests[seen.version]
    send(sock, b"", [], 20.0)


def test_a_header_that_never_rests_is_refused_with_how_often_it_changed(
    mapping: Mapping, page: HeaderPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.initialise(0, digest_of(0))
    monkeypatch.setattr(header_module, "_REST_S", 0.0)
    load, turns = mapping.load_word, iter(range(1_000))
    monkeypatch.setattr(mapping, "load_word", lambda at: load(at) + (next(turns) % 2 << 8))
    with pytest.raises(SegmentError, match="does not come to rest; got 100 changes"):
        page.read()
