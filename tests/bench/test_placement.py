"""Placements as commands write them."""

from __future__ import annotations

import pytest

from rollplex.bench.placement import parse_placements
from rollplex.errors import ConfigError


def test_a_placement_says_its_devices_and_the_keys_that_make_it() -> None:
    together, apart = parse_placements("2x2/1x4, 2x1+1x2")
    assert (together.devices, together.rollout_devices, str(together)) == (4, 0, "2x2/1x4")
    assert together.overrides == (
        "parallel.devices=4",
        "parallel.training=2",
        "parallel.rollout=1",
        "parallel.placement=colocated",
        "parallel.rollout_devices=0",
    )
    assert (apart.devices, apart.training_devices, apart.rollout_devices, str(apart)) == (4, 2, 2, "2x1+1x2")
    assert apart.overrides[3:] == ("parallel.placement=disaggregated", "parallel.rollout_devices=2")


@pytest.mark.parametrize("text", ["4x1", "4x1/2x1", "0x1/1x0", "0x1+1x1", "4/4", "4x1/2x2,", "axb/cxd", "1x1-1x1"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no layout of devices"):
        parse_placements(text)
