"""A version on several devices has one digest: it tells them apart, and does not depend on who answered first."""

from __future__ import annotations

from rollplex.protocol.common import Device
from rollplex_coordinator.decisions.digests import combined

A, B = Device(), Device(index=1)


def test_of_one_device_it_is_the_devices_own() -> None:
    assert combined({A: "d" * 64}) == "d" * 64


def test_the_order_of_the_answers_does_not_matter_but_whose_they_are_does() -> None:
    digest = combined({A: "a" * 64, B: "b" * 64})
    assert digest == combined({B: "b" * 64, A: "a" * 64})
    assert digest != combined({A: "b" * 64, B: "a" * 64})
    assert digest not in {"a" * 64, "b" * 64}
    assert len(digest) == 64
