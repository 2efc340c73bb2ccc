"""Shares over a driver without a GPU: what is current when, what is waited for, what is made."""

from __future__ import annotations

import pytest

from rollplex.multiprocessors.cut import Side
from rollplex.multiprocessors.green import GreenDriver, MultiprocessorError
from rollplex.multiprocessors.shares import Multiprocessors
from support.green import FakeGreenBinding


def over(binding: FakeGreenBinding) -> Multiprocessors:
    return Multiprocessors(lambda: GreenDriver(0, binding))


def never() -> GreenDriver:
    raise AssertionError("no driver is needed")


def test_two_processes_compute_on_disjoint_multiprocessors() -> None:
    decode, prefix = FakeGreenBinding(), FakeGreenBinding()
    with over(decode).on_share(0.36, Side.FIRST), over(prefix).on_share(0.64, Side.LAST):
        assert decode.current == tuple(range(48))
        assert prefix.current == tuple(range(48, 132))
    assert decode.stack == prefix.stack == []


def test_everything_is_complete_before_a_share_is_entered_and_before_it_is_left() -> None:
    binding = FakeGreenBinding()
    with over(binding).on_share(0.5, Side.LAST):
        binding.story.append(("work", binding.current))
    part = tuple(range(64, 132))
    assert binding.story == [("create", part), ("synchronize", None), ("work", part), ("synchronize", part)]


def test_a_part_is_made_once() -> None:
    binding = FakeGreenBinding()
    shares = over(binding)
    for share in (0.5, 0.25, 0.5, 0.51):  # the last one comes to the same cut as the first
        with shares.on_share(share, Side.FIRST):
            pass
    assert [len(members or ()) for what, members in binding.story if what == "create"] == [64, 32]


def test_work_that_fails_leaves_the_share_too() -> None:
    binding = FakeGreenBinding()
    with pytest.raises(ValueError, match="work"), over(binding).on_share(0.5, Side.LAST):
        raise ValueError("work")
    assert binding.stack == []


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_host_has_nothing_to_share(share: float) -> None:
    with Multiprocessors(None).on_share(share, Side.LAST):
        pass


def test_the_whole_device_needs_no_green_context() -> None:
    with Multiprocessors(never).on_share(1.0, Side.LAST):
        pass


def test_a_stream_belongs_to_its_part() -> None:
    assert over(FakeGreenBinding()).stream(0.5, Side.LAST) == 4096 + 68


@pytest.mark.parametrize("call", ["cuDevSmResourceSplitByCount", "cuGreenCtxCreate", "cuDeviceGetDevResource"])
def test_a_refusal_names_the_call_and_the_code(call: str) -> None:
    shares = over(FakeGreenBinding(refuses=frozenset({call})))
    with pytest.raises(MultiprocessorError, match=rf"refused {call}.*INVALID_RESOURCE.*prefix_share"):
        shares.part(0.5, Side.LAST)


def test_a_driver_that_cuts_elsewhere_is_refused() -> None:
    with pytest.raises(MultiprocessorError, match=r"elsewhere than asked.*got 80.*needed 64"):
        over(FakeGreenBinding(grain=80)).part(0.5, Side.FIRST)


def test_a_driver_without_green_contexts_is_refused() -> None:
    class Old:
        def cuInit(self, flags: int) -> tuple[int]:  # noqa: N802 - the driver's name
            return (0,)

    with pytest.raises(MultiprocessorError, match=r"has no cuDeviceGet.*CUDA 12\.4"):
        GreenDriver(0, Old())


def test_a_missing_binding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplex.multiprocessors.green._BINDING", "cuda.bindings.no_such_thing")
    with pytest.raises(MultiprocessorError, match=r"rollplex\[cuda\]"):
        GreenDriver()
