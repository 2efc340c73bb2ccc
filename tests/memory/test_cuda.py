"""Segments of a GPU against a driver that is none: what is called, what is undone, what is counted."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.utils.dlpack

from rollplex.errors import SegmentError
from rollplex.layout.parameters import HEADER_BYTES
from rollplex.memory import dlpack, tensors
from rollplex.memory.cuda import CudaBackend
from rollplex.memory.cuda_driver import Driver, Live
from rollplex.memory.header import HeaderPage, State
from rollplex.memory.placement import GRANULE_BYTES, taken_bytes
from rollplex.protocol.common import Memory
from support.fake_cuda import GRANULE, UUIDS, CUresult, FakeCuda

SIZE = GRANULE + 1000


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def memory(cuda: FakeCuda) -> CudaBackend:
    return CudaBackend(driver=Driver(cuda))


@pytest.fixture
def fd(memory: CudaBackend) -> Iterator[int]:
    descriptor = memory.create(SIZE, "test")
    yield descriptor
    os.close(descriptor)


def test_making_a_segment_needs_no_context_and_keeps_the_descriptor_alone(
    memory: CudaBackend, cuda: FakeCuda, fd: int
) -> None:
    assert not [call for call in cuda.calls if "Ctx" in call]
    assert cuda.left == {"handles": 0, "ranges": 0, "mapped": 0, "pushed": 0}
    assert memory.live() == Live()
    assert not os.get_inheritable(fd)
    assert memory.size(fd) == SIZE
    assert [len(content) for content in cuda.memory.values()] == [2 * GRANULE]


def test_one_import_is_one_release_and_the_mapping_keeps_the_memory(
    memory: CudaBackend, cuda: FakeCuda, fd: int
) -> None:
    before = len(cuda.calls)
    mapping = memory.map(fd, SIZE)
    calls = cuda.calls[before:]
    assert (calls.count("cuMemImportFromShareableHandle"), calls.count("cuMemRelease")) == (1, 1)
    assert memory.live() == Live(handles=0, reservations=1, mappings=1)
    mapping.close()
    assert memory.live() == Live()
    assert cuda.left == {"handles": 0, "ranges": 0, "mapped": 0, "pushed": 0}


def test_a_release_that_is_forgotten_is_counted(memory: CudaBackend, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "release", lambda *_: None)
    memory.map(fd, SIZE).close()
    assert memory.live() == Live(handles=1)


@pytest.mark.parametrize(
    "call",
    [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
def test_whatever_fails_while_mapping_is_undone_and_named(
    memory: CudaBackend, cuda: FakeCuda, fd: int, call: str
) -> None:
    cuda.failing[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(SegmentError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        memory.map(fd, SIZE)
    assert cuda.left == {"handles": 0, "ranges": 0, "mapped": 0, "pushed": 0}
    assert memory.live() == Live()
    cuda.failing.clear()
    memory.map(fd, SIZE).close()


@pytest.mark.parametrize("call", ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_whatever_fails_while_making_leaves_nothing(
    memory: CudaBackend, cuda: FakeCuda, call: str, open_fds: Callable[[], set[str]]
) -> None:
    before = open_fds()
    cuda.failing[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(SegmentError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        memory.create(SIZE, "test")
    assert memory.live() == Live()
    assert cuda.left["handles"] == 0
    assert open_fds() == before


def test_too_large_a_segment_is_refused_with_both_numbers_and_advice(memory: CudaBackend, cuda: FakeCuda) -> None:
    with pytest.raises(SegmentError) as caught:
        memory.create(2**50, "large")
    assert "1125899906842624 bytes" in caught.value.got
    assert "memory.budget" in caught.value.do


def test_another_size_is_refused_in_the_process_that_made_it_and_in_others(
    memory: CudaBackend, cuda: FakeCuda, fd: int
) -> None:
    for wrong in (SIZE - 1, SIZE + 1, 0):
        with pytest.raises(SegmentError, match=f"another size.*{SIZE} bytes.*needed {wrong}"):
            memory.map(fd, wrong)
    other = CudaBackend(driver=Driver(cuda))
    for wrong in (GRANULE, 3 * GRANULE, 1):
        with pytest.raises(SegmentError, match="another size"):
            other.map(fd, wrong)
    assert cuda.left == {"handles": 0, "ranges": 0, "mapped": 0, "pushed": 0}
    other.map(fd, 2 * GRANULE).close()


def test_a_descriptor_of_another_process_does_not_tell_its_size(cuda: FakeCuda, fd: int) -> None:
    with pytest.raises(SegmentError, match="does not tell its size"):
        CudaBackend(driver=Driver(cuda)).size(fd)


def test_a_number_that_names_something_else_by_now_is_not_taken_for_a_segment(memory: CudaBackend) -> None:
    gone = memory.create(SIZE, "test")
    reader, writer = os.pipe()
    os.dup2(reader, gone)
    with pytest.raises(SegmentError, match="does not tell its size"):
        memory.size(gone)
    with pytest.raises(SegmentError, match="a pipe"):
        memory.map(gone, SIZE)
    for descriptor in (gone, reader, writer):
        os.close(descriptor)
    with pytest.raises(SegmentError, match="not open"):
        memory.size(gone)


def test_host_memory_is_not_mapped_as_device_memory(memory: CudaBackend) -> None:
    memfd = os.memfd_create("x")
    with pytest.raises(SegmentError, match="not a segment of device memory"):
        memory.verify(memfd)
    os.close(memfd)


def test_close_refuses_while_a_view_lives_and_can_be_done_after(memory: CudaBackend, fd: int) -> None:
    mapping = memory.map(fd, SIZE)
    view = mapping.device_view(8, 100)
    interface = view.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"]) == ((100,), "|u1")
    assert interface["data"][0] - mapping.device_view(0, 1).__cuda_array_interface__["data"][0] == 8
    with pytest.raises(SegmentError, match="while something looks at it"):
        mapping.close()
    assert not mapping.closed
    assert memory.live() == Live(reservations=1, mappings=1)
    del view
    mapping.close()
    mapping.close()
    assert memory.live() == Live()
    with pytest.raises(SegmentError, match="unmapped"):
        mapping.device_view(0, 1)


def test_a_view_that_only_a_cycle_keeps_is_nobodys(memory: CudaBackend, fd: int) -> None:
    mapping = memory.map(fd, SIZE)
    cycle: list[object] = [mapping.device_view(0, 1)]
    cycle.append(cycle)
    del cycle
    mapping.close()
    assert mapping.closed


def test_the_processor_cannot_look_at_device_memory(memory: CudaBackend, fd: int) -> None:
    with memory.map(fd, SIZE) as mapping:
        with pytest.raises(SegmentError, match="no bytes"):
            _ = mapping.buffer
        with pytest.raises(SegmentError, match="no bytes"):
            mapping.view(0, 1)


def test_a_new_segment_becomes_zero_when_its_first_writer_clears_it(memory: CudaBackend, fd: int) -> None:
    with memory.map(fd, SIZE) as mapping:
        assert mapping.read(0, 100) != bytes(100), "the fake gives what a GPU may give"
        mapping.clear()
        assert mapping.read(0, SIZE) == bytes(SIZE)


def test_copies_wait_for_the_gpu_before_and_after(memory: CudaBackend, cuda: FakeCuda, fd: int) -> None:
    with memory.map(fd, SIZE) as one, memory.map(fd, SIZE) as two:
        one.write(4000, b"across" * 10)
        assert not cuda.unsynchronized
        cuda.unsynchronized = True  # a kernel of ours runs
        assert two.read(4000, 60) == b"across" * 10
        two.store_word(4096, 2**64 - 3)
        assert one.load_word(4096) == 2**64 - 3
        one.write(SIZE, b"")
        assert one.read(SIZE, 0) == b""
        for attempt in (lambda: one.read(SIZE, 1), lambda: one.write(SIZE - 1, b"ab"), lambda: one.device_view(-1, 1)):
            with pytest.raises(SegmentError, match="outside"):
                attempt()
        with pytest.raises(SegmentError, match="aligned"):
            one.store_word(4, 1)
    assert cuda.contexts == [], "the thread's own context is current again"


def test_a_header_page_works_on_device_memory(memory: CudaBackend, fd: int) -> None:
    with memory.map(fd, SIZE) as one, memory.map(fd, SIZE) as two:
        one.clear()
        writer = HeaderPage(one, run_id="r", table_hash="ab" * 32)
        reader = HeaderPage(two, run_id="r", table_hash="ab" * 32)
        writer.initialise(0, "11" * 32)
        writer.begin_update(0)
        assert reader.read().state is State.UPDATING
        writer.publish(1, "22" * 32)
        assert (reader.require(1).digest, HEADER_BYTES < SIZE) == ("22" * 32, True)


def test_the_gpu_is_found_by_its_uuid(cuda: FakeCuda) -> None:
    driver = Driver(cuda)
    assert [driver.device(uuid, 0) for uuid in UUIDS] == [0, 1]
    assert driver.device(None, 1) == 1
    with pytest.raises(SegmentError, match="no such GPU.*GPU-dead.*" + UUIDS[0]):
        driver.device("GPU-dead", 0)
    with pytest.raises(SegmentError, match="number 2; needed one of 2"):
        driver.device(None, 2)


def test_a_segment_of_another_gpu_is_mapped_for_the_own_one_without_a_context_there(cuda: FakeCuda) -> None:
    driver = Driver(cuda)
    fd = CudaBackend(uuid=UUIDS[0], driver=driver).create(SIZE, "peer")
    with CudaBackend(uuid=UUIDS[1], driver=driver).map(fd, SIZE) as mapping:
        mapping.write(100, b"from the other")
        assert mapping.read(100, 14) == b"from the other"
        assert mapping.device_view(0, 8).device == 1
    os.close(fd)
    assert (cuda.accesses, cuda.retained) == ([(1, 0)], {1})
    assert cuda.left == {"handles": 0, "ranges": 0, "mapped": 0, "pushed": 0}


def test_a_gpu_that_no_link_leads_to_is_named_and_nothing_is_left(cuda: FakeCuda) -> None:
    cuda.joined = False
    driver = Driver(cuda)
    fd = CudaBackend(uuid=UUIDS[0], driver=driver).create(SIZE, "peer")
    with pytest.raises(SegmentError, match="cannot be reached from this GPU") as caught:
        CudaBackend(uuid=UUIDS[1], driver=driver).map(fd, SIZE)
    assert (caught.value.got, "devices: 1" in caught.value.do) == (f"CUDA_ERROR_INVALID_DEVICE for {UUIDS[1]}", True)
    assert cuda.left == {"handles": 0, "ranges": 0, "mapped": 0, "pushed": 0}
    CudaBackend(uuid=UUIDS[0], driver=driver).map(fd, SIZE).close()
    os.close(fd)


def test_a_tensor_claims_the_gpu_that_it_was_mapped_for(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a host can see it: what torch is given, and that the mapping stays open until torch drops it."""
    driver = Driver(cuda)
    fd = CudaBackend(uuid=UUIDS[0], driver=driver).create(SIZE, "peer")
    mapping = CudaBackend(uuid=UUIDS[1], driver=driver).map(fd, SIZE)
    os.close(fd)
    address = mapping.device_view(4096, 1).address
    before, taken = dlpack.kept(), list[tuple[int, dlpack._Managed]]()

    def take(capsule: object) -> SimpleNamespace:
        at = ctypes.pythonapi.PyCapsule_GetPointer
        at.restype, at.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        found = at(capsule, b"dltensor")
        managed = dlpack._Managed.from_address(found)
        taken.append((found, managed))
        tensor = SimpleNamespace(data_ptr=lambda: managed.array.data)
        tensor.view = lambda _: tensor
        return tensor

    monkeypatch.setattr(tensors, "from_dlpack", take)
    tensors.tensor(mapping, 4096, (3, 5), torch.float32)
    [(found, managed)] = taken
    array = managed.array
    assert (array.data, array.device.kind, array.device.number) == (address, dlpack.CUDA, 1)
    assert (array.dimensions, array.shape[0], array.type.bits, bool(array.strides)) == (1, 60, 8, False)
    with pytest.raises(SegmentError, match="looks at it"):
        mapping.close()
    managed.deleter(found)
    mapping.close()
    assert dlpack.kept() == before


def test_what_torch_refuses_keeps_nothing_open(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> object:
        raise RuntimeError("no CUDA")

    monkeypatch.setattr(tensors, "from_dlpack", refuse)
    backend = CudaBackend(driver=Driver(cuda))
    fd = backend.create(SIZE, "test")
    mapping = backend.map(fd, SIZE)
    os.close(fd)
    with pytest.raises(RuntimeError):
        tensors.tensor(mapping, 0, (8,), torch.uint8)
    mapping.close()


def test_torch_s_own_tensors_over_a_capsule_keep_what_it_looks_at_until_the_last_view() -> None:
    class Owner:
        pass

    content, owner, before = (ctypes.c_uint8 * 64)(*range(64)), Owner(), dlpack.kept()
    alive = weakref.ref(owner)
    capsule = dlpack.Capsule(owner, kind=dlpack.CPU, number=0, address=ctypes.addressof(content), size_bytes=64)
    found = torch.utils.dlpack.from_dlpack(capsule.given)
    assert (found.tolist(), found.data_ptr()) == (list(range(64)), ctypes.addressof(content))
    part = found.view(torch.int16)[3:].view(1, 29).t()
    del owner, capsule, found
    assert (alive() is not None, dlpack.kept()) == (True, before + 1)
    part.zero_()
    assert bytes(content) == bytes(range(6)) + bytes(58)
    del part
    assert (alive(), dlpack.kept()) == (None, before)


def test_a_tensor_that_outlives_everything_does_not_break_the_end_of_its_process() -> None:
    lines = """
        import ctypes, torch, torch.utils.dlpack
        from rollplex.memory import dlpack
        content = (ctypes.c_uint8 * 64)()
        for size in range(1, 50):
            at = ctypes.addressof(content)
            capsule = dlpack.Capsule(content, kind=dlpack.CPU, number=0, address=at, size_bytes=64)
            setattr(torch, f"left_{size}", torch.utils.dlpack.from_dlpack(capsule.given))
        setattr(ctypes, "left", torch.left_1)
        loop = [torch.left_2]
        loop.append(loop)
        print(dlpack.kept())
        """
    program = [sys.executable, "-c", textwrap.dedent(lines)]
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "49\n", "")


def test_sizes_on_a_device_are_whole_granules() -> None:
    assert GRANULE_BYTES == GRANULE
    assert [taken_bytes(n, Memory.CUDA) for n in (1, GRANULE, GRANULE + 1)] == [GRANULE, GRANULE, 2 * GRANULE]
    assert taken_bytes(GRANULE + 1, Memory.HOST) == GRANULE + 1


def test_a_gpu_with_other_granules_is_refused(memory: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "granularity", lambda *_: 3 * 2**20)
    with pytest.raises(SegmentError, match="other portions"):
        memory.create(SIZE, "test")


def test_without_a_driver_the_error_says_what_to_do() -> None:
    class NoLibrary:
        def cuInit(self, flags: int) -> None:  # noqa: N802
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(SegmentError, match="no CUDA driver.*libcuda.*device.kind: host"):
        Driver(NoLibrary())


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplex.memory.cuda_driver._BINDING", "cuda.no_such_module")
    with pytest.raises(SegmentError, match=r"rollplex\[cuda\]"):
        Driver()
