"""What a run leaves, read back; and a line of it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]

from rollplex_coordinator.records.completions import Completion


def events_in(run_dir: Path) -> list[Any]:
    """Every event of TensorBoard's one file, checksums checked."""
    (file,) = (run_dir / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    content = file.read_bytes()
    events, at = [], 0
    while at < len(content):
        (size,) = struct.unpack_from("<Q", content, at)
        data = content[at + 12 : at + 12 + size]
        assert struct.unpack_from("<I", content, at + 8) == (masked_crc32c(content[at : at + 8]),)
        assert struct.unpack_from("<I", content, at + 12 + size) == (masked_crc32c(data),)
        events.append(Event.FromString(data))
        at += 16 + size
    return events


def scalars_in(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and values of each event that has some."""
    return [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in events_in(run_dir)
        if event.HasField("summary")
    ]


def completion(text: str) -> Completion:
    """A response with this text."""
    return Completion(
        source="train", step=3, version=3, row=9, group=0, sample=1,
        completion=text, reward=0.5, rewards={"right": 1.0}, tokens=2, stopped=True,
    )  # fmt: skip
