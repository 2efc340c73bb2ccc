"""The coordinator's input child: checks the datasets once, then prepares the inputs of each step.

Steps are prepared ahead in private memory, bytes not yet normalised, and written when their segment exists. Owns what
the messages of `rollplex.protocol.inputs` do. Does not know steps' order, leases, or who reads the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, assert_never

from rollplex.data.inputs import Prepared, lay_out, write
from rollplex.data.source import Source, open_source
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import ConfigError, StateError
from rollplex.layout.shape import ModelShape, media_ids, read_shape
from rollplex.memory.segment import Mapping
from rollplex.protocol.common import Leave, PromptSlot, SegmentRef
from rollplex.protocol.inputs import (
    DataChecked,
    FromInput,
    InputsSized,
    InputsWritten,
    OpenData,
    PrepareInputs,
    RowsShown,
    ShowRows,
    ToInput,
    WriteInputs,
)

MAX_AHEAD = 64
"""Steps that may be prepared and not yet written."""


class SegmentMaps(Protocol):
    """What this service needs of `rollplex.worker.Segments`."""

    def attach(self, ref: SegmentRef) -> Mapping: ...

    def detach(self, segment: int) -> None: ...


class InputService:
    """One dataset reader for the life of a run."""

    def __init__(self, segments: SegmentMaps) -> None:
        self._segments = segments
        self._sources: dict[str, Source] = {}
        self._ahead: dict[int, tuple[Sequence[Prepared], Sequence[PromptSlot]]] = {}

    def handle(self, message: ToInput, reply: Callable[[FromInput], None]) -> None:
        """Carry out one instruction and answer it.

        Raises:
            DataError: a row that cannot be used; names it.
            ModelError, ConfigError: a model folder or token text that cannot be used.
            StateError: an instruction out of order.
        """
        match message:
            case OpenData():
                reply(self._open(message))
            case PrepareInputs():
                reply(self._prepare(message))
            case WriteInputs():
                reply(self._write(message))
            case ShowRows():
                source = self._source(message.source)
                shown = tuple(source.show(row) for row in message.rows)
                reply(RowsShown(cause=message.cause, step=message.step, rows=shown))
            case Leave():
                self._ahead.clear()
            case _:
                assert_never(message)

    def _open(self, message: OpenData) -> DataChecked:
        folder = Path(message.model_path)
        shape = read_shape(folder)
        tokenizer = TextTokenizer(folder)
        self._sources = {source.name: open_source(source, folder, tokenizer) for source in message.sources}
        if len(self._sources) != len(message.sources):
            raise ConfigError("Two datasets have the same name", got=str([s.name for s in message.sources]))
        never = sorted({*media_ids(shape), *(tokenizer.id_of(token) for token in message.never_sample)})
        return DataChecked(
            cause=message.cause,
            sources=tuple(source.check() for source in self._sources.values()),
            never_sampled=tuple(never),
            stop_ids=_stop_ids(message.stop_tokens, tokenizer, shape, never),
            row_width=shape.row_width,
        )

    def _prepare(self, message: PrepareInputs) -> InputsSized:
        source = self._source(message.source)
        if len(self._ahead) >= MAX_AHEAD:
            raise StateError("Too many steps are prepared and not written", got=str(sorted(self._ahead)))
        prepared = [source.prepare(row) for row in message.rows]
        slots, size_bytes = lay_out(prepared)
        self._ahead[message.step] = (prepared, slots)
        return InputsSized(cause=message.cause, step=message.step, size_bytes=size_bytes, prompts=slots)

    def _source(self, name: str) -> Source:
        source = self._sources.get(name)
        if source is None:
            raise StateError("No such dataset is open", got=name, needed=str(sorted(self._sources)))
        return source

    def _write(self, message: WriteInputs) -> InputsWritten:
        if message.step not in self._ahead:
            raise StateError("This step was not prepared", got=str(message.step), needed=str(sorted(self._ahead)))
        prepared, slots = self._ahead.pop(message.step)
        write(self._segments.attach(message.segment).buffer, prepared, slots)
        self._segments.detach(message.segment.segment)
        return InputsWritten(cause=message.cause, step=message.step)


def _stop_ids(
    tokens: Sequence[str], tokenizer: TextTokenizer, shape: ModelShape, never: Sequence[int]
) -> tuple[int, ...]:
    """The ids that end a response: those named, else the model's own.

    Raises:
        ConfigError: none of them may be sampled, or one that was named may not.
    """
    ids = tuple(dict.fromkeys(tokenizer.id_of(token) for token in tokens)) if tokens else shape.eos_ids
    barred = [index for index in ids if index in never]
    if not ids or (tokens and barred) or len(barred) == len(ids):
        raise ConfigError(
            "No response could end",
            got=f"stop ids {list(ids)}, of which {barred} are never sampled",
            needed="a stop token that may be sampled",
            do="Set rollout.stop_tokens, or take the token out of rollout.never_sample.",
        )
    return ids
