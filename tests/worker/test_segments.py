"""The segments that a worker has mapped: each fetched once, kept until its lease ends, nothing leaked."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollplex.errors import SegmentError
from rollplex.memory.cuda import CudaBackend
from rollplex.memory.cuda_driver import Driver, Live
from rollplex.memory.fds import recv, send
from rollplex.memory.segment import Backend, backend
from rollplex.protocol.codec import FROM_HOLDER, TO_HOLDER
from rollplex.protocol.common import Kind, Memory, SegmentRef
from rollplex.protocol.holder import Descriptor, NoSuchSegment
from rollplex.worker.segments import Segments
from support.fake_cuda import FakeCuda

SIZE = 8192
REF = SegmentRef(segment=7, kind=Kind.INPUTS, size_bytes=SIZE)


class Counter:
    """A worker's segments, and the holder's end of its stream. `open_files` counts while the holder is idle."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self.stream = ours
        self.segments = Segments(ours, backend, "r")
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._serving = self._pool.submit(lambda: None)
        self.asked: list[int] = []

    def answer(self, *answers: tuple[Any, tuple[int, ...]]) -> None:
        """Answer the next requests, in a thread."""

        def serve() -> None:
            for message, fds in answers:
                payload, _ = recv(self._theirs, 10.0, 65536, 0)
                self.asked.append(TO_HOLDER.decode(payload).segment)
                send(self._theirs, FROM_HOLDER.encode(message), fds, 10.0)

        self._serving = self._pool.submit(serve)

    def open_files(self) -> int:
        """Descriptors of this process."""
        self._serving.result(10)
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    def close(self) -> None:
        self._pool.shutdown()
        self.stream.close()
        self._theirs.close()


@pytest.fixture
def counter() -> Iterator[Counter]:
    made = Counter()
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[int]:
    """The holder's descriptor of a segment."""
    fd = backend("host").create(SIZE, "test")
    yield fd
    os.close(fd)


def described(**changes: Any) -> Descriptor:
    return Descriptor(**{"segment": 7, "kind": Kind.INPUTS, "size_bytes": SIZE, **changes})


def test_a_segment_is_fetched_on_first_use_and_mapped_once(counter: Counter, memory: int) -> None:
    counter.answer((described(), (memory,)))
    mapping = counter.segments.attach(REF)
    assert counter.segments.attach(REF) is mapping
    assert counter.asked == [7]
    assert counter.segments.attached == {7: SIZE}
    mapping.write(100, b"hello")
    with backend("host").map(memory, SIZE) as other:
        assert other.read(100, 5) == b"hello"


def test_its_descriptor_stays_open_until_it_is_given_back(counter: Counter, memory: int) -> None:
    before = counter.open_files()
    counter.answer((described(), (memory,)))
    mapping = counter.segments.attach(REF)
    assert counter.open_files() == before + 2, "and the one that Python's mmap makes for itself"
    counter.segments.detach(7)
    assert counter.open_files() == before
    assert mapping.closed
    assert counter.segments.attached == {}
    counter.segments.detach(7)
    counter.answer((described(), (memory,)))
    assert counter.segments.attach(REF).size_bytes == SIZE, "it can be fetched again"
    counter.segments.detach(7)


def test_what_something_still_looks_at_stays_mapped_and_known(counter: Counter, memory: int) -> None:
    counter.answer((described(), (memory,)))
    view = counter.segments.attach(REF).view(0, 10)
    with pytest.raises(SegmentError, match="while something looks at it"):
        counter.segments.detach(7)
    assert counter.segments.attached == {7: SIZE}
    assert bytes(view) == bytes(10)
    view.release()
    counter.segments.detach(7)
    assert counter.segments.attached == {}


Answer = Callable[[int], tuple[Any, tuple[int, ...]]]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda fd: (NoSuchSegment(segment=7, why="its lease has ended"), ()), "segment 7: its lease has ended"),
        (lambda fd: (described(kind=Kind.GRADIENTS), (fd,)), "with 1 descriptors"),
        (lambda fd: (described(size_bytes=4096), (fd,)), "with 1 descriptors"),
        (lambda fd: (described(memory=Memory.CUDA), (fd,)), "with 1 descriptors"),
        (lambda fd: (described(), ()), "with 0 descriptors"),
    ],
    ids=["none", "another kind", "another size", "another memory", "no descriptor"],
)
def test_anything_but_the_segment_that_was_asked_for_is_refused_and_no_descriptor_kept(
    counter: Counter, memory: int, answer: Answer, said: str
) -> None:
    before = counter.open_files()
    counter.answer(answer(memory))
    with pytest.raises(SegmentError, match=f"cannot attach a segment; got .*{said}.*Its lease has ended"):
        counter.segments.attach(REF)
    assert counter.open_files() == before
    assert counter.segments.attached == {}


def test_a_descriptor_that_is_no_sealed_segment_is_not_mapped_and_not_kept(counter: Counter, tmp_path: Path) -> None:
    file = (tmp_path / "file").open("wb+")
    file.truncate(SIZE)
    before = counter.open_files()
    counter.answer((described(), (file.fileno(),)))
    with pytest.raises(SegmentError, match="not a segment of host memory"):
        counter.segments.attach(REF)
    assert counter.open_files() == before
    file.close()


def test_segments_come_and_go_without_leaking(counter: Counter, memory: int) -> None:
    before = counter.open_files()
    counter.answer(*[(described(segment=n), (memory,)) for n in range(50)])
    for number in range(50):
        counter.segments.attach(SegmentRef(segment=number, kind=Kind.INPUTS, size_bytes=SIZE))
        if number >= 3:
            counter.segments.detach(number - 3)
    assert counter.segments.attached == dict.fromkeys((47, 48, 49), SIZE)
    for number in (47, 48, 49):
        counter.segments.detach(number)
    assert counter.open_files() == before


def test_a_descriptor_comes_without_a_mapping_and_is_not_fetched_again_for_one(counter: Counter, memory: int) -> None:
    before = counter.open_files()
    counter.answer((described(), (memory,)))
    fd = counter.segments.descriptor(REF)
    assert counter.open_files() == before + 1
    assert counter.segments.attached == {}
    counter.segments.attach(REF)
    assert counter.segments.descriptor(REF) == fd
    assert counter.asked == [7]
    counter.segments.detach(7)
    assert counter.open_files() == before


def test_a_descriptor_that_was_never_mapped_is_closed_by_detach(counter: Counter, memory: int) -> None:
    before = counter.open_files()
    counter.answer((described(), (memory,)))
    counter.segments.descriptor(REF)
    counter.segments.detach(7)
    assert counter.open_files() == before


def test_each_kind_of_memory_has_its_backend_and_new_device_memory_is_cleared(counter: Counter) -> None:
    device = CudaBackend(driver=Driver(FakeCuda()))
    asked: list[Memory] = []

    def opened(memory: Memory) -> Backend:
        asked.append(memory)
        return device if memory is Memory.CUDA else backend(memory)

    segments = Segments(counter.stream, opened, "r")
    host, fds = backend("host").create(SIZE, "host"), [device.create(SIZE, "device") for _ in range(2)]
    counter.answer(
        *[(described(segment=number, memory=Memory.CUDA), (fd,)) for number, fd in enumerate(fds)],
        (described(segment=2), (host,)),
    )
    refs = [SegmentRef(segment=n, kind=Kind.INPUTS, size_bytes=SIZE, memory=Memory.CUDA) for n in range(2)]
    assert segments.attach(refs[0]).read(0, SIZE) != bytes(SIZE)
    assert segments.attach_new(refs[1]).read(0, SIZE) == bytes(SIZE)
    on_host = segments.attach_new(SegmentRef(segment=2, kind=Kind.INPUTS, size_bytes=SIZE))
    assert (on_host.memory, asked) == (Memory.HOST, [Memory.CUDA, Memory.HOST])
    for number in range(3):
        segments.detach(number)
    assert device.live() == Live()
    for fd in (host, *fds):
        os.close(fd)
