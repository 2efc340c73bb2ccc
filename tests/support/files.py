"""What a run leaves, read back; and a line of it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]

from rollplex.protocol.inputs import Thumbnail
from rollplex_coordinator.records.completions import Completion
from rollplex_coordinator.records.sample_table import SampleGroup, SampleResponse, SampleTable


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
    """Step and numbers of each event that has some."""
    found = [
        (event.step, {v.tag: v.simple_value for v in event.summary.value if v.WhichOneof("value") == "simple_value"})
        for event in events_in(run_dir)
    ]
    return [(step, values) for step, values in found if values]


def completion(text: str) -> Completion:
    """A response with this text."""
    return Completion(
        source="train", step=3, version=3, row=9, group=0, sample=1,
        completion=text, reward=0.5, rewards={"right": 1.0}, tokens=2, stopped=True,
    )  # fmt: skip


def sample_response(text: str) -> SampleResponse:
    """The same in a table of samples."""
    return SampleResponse(
        sample=1, completion=text, reward=0.5, rewards={"right": 1.0}, advantage=None, tokens=2, stopped=True
    )


PNG = b"\x89PNG\r\n\x1a\n and so on"


def sample_table(
    text: str, prompt: str = "what?", step: int = 50, media: Sequence[Thumbnail] | None = None
) -> SampleTable:
    """One group of one response with this text."""
    shown = [Thumbnail(name="image 1", png=PNG, width=96, height=40)] if media is None else media
    group = SampleGroup(group=0, row=9, prompt=prompt, media=tuple(shown), responses=(sample_response(text),))
    return SampleTable(step=step, version=step, functions=("right",), groups=(group,), shown=True)
