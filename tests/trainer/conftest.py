"""A tiny Qwen2.5-VL folder, and segments of host memory in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.memory.segment import Mapping, backend
from rollplex.protocol.common import Kind, SegmentRef

VOCAB = 70
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    "pad_token_id": 69,
    "eos_token_id": 68,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 16,
    "fullatt_block_indexes": [0],
    "window_size": 56,
}
SPECIAL: dict[str, Any] = {
    "image_token_id": 64,
    "video_token_id": 65,
    "vision_start_token_id": 66,
    "vision_end_token_id": 67,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, both towers, random weights far enough from 0 that every parameter matters."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True, **SPECIAL)
    torch.manual_seed(3)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or "ln_q" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    return folder


class HostSegments:
    """What a worker's `Segments` is to a service, with segments that the test makes."""

    run_id = "test-run"

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._mapped: dict[int, Mapping] = {}
        self._backend = backend("host")

    def create(self, kind: Kind, size_bytes: int) -> SegmentRef:
        number = len(self._fds) + 1
        self._fds[number] = self._backend.create(size_bytes, f"test-{kind}")
        return SegmentRef(segment=number, kind=kind, size_bytes=size_bytes)

    def attach(self, ref: SegmentRef) -> Mapping:
        if ref.segment not in self._mapped:
            self._mapped[ref.segment] = self._backend.map(self._fds[ref.segment], ref.size_bytes)
        return self._mapped[ref.segment]

    def map_again(self, ref: SegmentRef) -> Mapping:
        """A second mapping of the same memory, as another process has it."""
        return self._backend.map(self._fds[ref.segment], ref.size_bytes)

    def detach(self, segment: int) -> None:
        self._mapped.pop(segment).close()

    @property
    def attached(self) -> set[int]:
        return set(self._mapped)

    def close(self) -> None:
        self._mapped.clear()
        for fd in self._fds.values():
            os.close(fd)


@pytest.fixture
def make_segments() -> Iterator[Callable[[], HostSegments]]:
    made: list[HostSegments] = []

    def make() -> HostSegments:
        made.append(HostSegments())
        return made[-1]

    yield make
    for segments in made:
        segments.close()
