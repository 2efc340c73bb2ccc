"""A start of the real SGLang that comes to nothing."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from rollplex.errors import SegmentError
from rollplex.protocol.common import Memory
from rollplex_rollout.loaded import LentWeights
from rollplex_rollout.sglang.starting import start
from support.live_sglang import LiveNode, kernels, processes, unavailable

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-"),
    pytest.mark.filterwarnings("ignore"),  # SGLang's own
    pytest.mark.timeout(600),
]


def test_a_loader_that_cannot_map_the_weights_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    node = LiveNode(tmp_path / "model", tmp_path, "float32")
    other = replace(node.setup, weights=LentWeights(node.segments, structs.replace(node.ref, size_bytes=4096)))
    with kernels(Memory.HOST), pytest.raises(SegmentError, match="another size"):
        start(other)
    assert processes() == []
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    node.segments.close()
    del other
    gc.collect()  # what SGLang left half made, while its warnings are of no interest
