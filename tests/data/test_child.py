"""The input child: its messages, and what it writes into a segment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from rollplex.data.child import InputService
from rollplex.data.inputs import ALIGN_BYTES, write
from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.source import Source
from rollplex.errors import ConfigError, DataError, ModelError, SegmentError, StateError
from rollplex.layout.shape import ModelShape, media_ids
from rollplex.memory.segment import Mapping, backend
from rollplex.protocol.codec import INPUT_CHANNEL
from rollplex.protocol.common import Kind, Leave, SegmentRef
from rollplex.protocol.inputs import (
    DataChecked,
    DataSource,
    InputsSized,
    InputsWritten,
    OpenData,
    PrepareInputs,
    RowsShown,
    ShowRows,
    ToInput,
    WriteInputs,
)

Dataset = Callable[..., DataSource]
T = TypeVar("T")
ROWS: list[object] = [
    {"prompt": [{"role": "user", "content": "what is the colour?"}], "images": ["a.png"]},
    {"prompt": "plain text of one row"},
    {"prompt": "<image> and <video>", "images": ["b.jpg"], "videos": [[f"f{i}.png" for i in range(6)]], "video_fps": 7},
]


class Holder:
    """Segments of this process, by number; remembers what was attached and detached."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._memory = backend("host")
        self._fds: dict[int, int] = {}
        self._mapped: dict[int, Mapping] = {}

    def create(self, number: int, size_bytes: int) -> SegmentRef:
        self._fds[number] = self._memory.create(size_bytes, f"test-{number}")
        return SegmentRef(segment=number, kind=Kind.INPUTS, size_bytes=size_bytes)

    def attach(self, ref: SegmentRef) -> Mapping:
        self.events.append(f"attach {ref.segment}")
        self._mapped[ref.segment] = self._memory.map(self._fds[ref.segment], ref.size_bytes)
        return self._mapped[ref.segment]

    def detach(self, segment: int) -> None:
        self.events.append(f"detach {segment}")
        self._mapped.pop(segment).close()

    def content(self, ref: SegmentRef) -> bytes:
        with self._memory.map(self._fds[ref.segment], ref.size_bytes) as mapping:
            return mapping.read(0, ref.size_bytes)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.close()


@pytest.fixture
def service(holder: Holder) -> InputService:
    return InputService(holder)


def ask(service: InputService, message: ToInput, kind: type[T]) -> T:
    answers: list[Any] = []
    service.handle(message, answers.append)
    assert len(answers) == 1
    assert isinstance(answers[0], kind)
    return answers[0]


@pytest.fixture
def opening(model_folder: Path, dataset: Dataset) -> Callable[..., OpenData]:
    def make(**fields: Any) -> OpenData:
        values = {"never_sample": (), "stop_tokens": (), **fields}
        if "sources" not in fields:
            values["sources"] = (dataset(ROWS),)
        return OpenData(cause=1, model_path=str(model_folder), **values)

    return make


Opening = Callable[..., OpenData]


def test_opening_answers_with_the_checks_and_the_models_ids(
    service: InputService, opening: Opening, shape: ModelShape, dataset: Dataset, maker: PromptMaker, rules: Rules
) -> None:
    evaluation = dataset(ROWS[:1], name="held-out")
    checked = ask(service, opening(sources=(dataset(ROWS), evaluation)), DataChecked)
    assert [(source.name, source.num_rows) for source in checked.sources] == [("train", 3), ("held-out", 1)]
    assert checked.sources[0] == Source(dataset(ROWS), maker, rules).check()
    assert checked.never_sampled == media_ids(shape)
    assert checked.stop_ids == shape.eos_ids
    assert checked.row_width == 1176


def test_the_configurations_tokens_become_ids(service: InputService, opening: Opening, maker: PromptMaker) -> None:
    space, end = maker._tokenizer.id_of(" "), maker._tokenizer.id_of("<|im_start|>")
    checked = ask(service, opening(never_sample=("<|im_start|>", "<|image_pad|>"), stop_tokens=(" ", " ")), DataChecked)
    assert end in checked.never_sampled
    assert sorted(set(checked.never_sampled)) == list(checked.never_sampled)
    assert checked.stop_ids == (space,)


@pytest.mark.parametrize(
    "fields",
    [
        {"never_sample": ("two words",)},
        {"stop_tokens": ("<|nothing|>",)},
        {"stop_tokens": ("<|image_pad|>",)},
        {"stop_tokens": (" ", "<|im_end|>"), "never_sample": ("<|im_end|>",)},
        {"never_sample": ("<|im_end|>",)},
    ],
)
def test_tokens_with_which_no_response_could_end_are_refused(
    fields: dict[str, Any], service: InputService, opening: Opening
) -> None:
    with pytest.raises(ConfigError):
        service.handle(opening(**fields), lambda _: pytest.fail("answered"))


def test_each_dataset_has_its_own_template_and_bounds(
    service: InputService, opening: Opening, dataset: Dataset, tmp_path: Path, maker: PromptMaker
) -> None:
    (tmp_path / "short.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}")
    row = {"prompt": [{"role": "user", "content": "what?"}]}
    picture = {"prompt": "<image>", "images": ["b.jpg"]}  # 112 x 56; with a quarter of the pixels 56 x 28
    sources = (
        dataset([row], name="own"),
        dataset([row], name="short", chat_template=str(tmp_path / "short.jinja")),
        dataset([picture], name="large"),
        dataset([picture], name="small", max_pixels=56 * 56),
    )
    checked = ask(service, opening(sources=sources), DataChecked)
    own, short, large, small = checked.sources
    assert short.max_prompt_tokens == len(maker._tokenizer.encode("what?<|im_end|>")) < own.max_prompt_tokens
    assert (large.max_media_tokens, small.max_media_tokens) == (8, 2)
    sized = ask(service, PrepareInputs(cause=2, step=0, source="small", rows=(0,)), InputsSized)
    assert sum(medium.rows for medium in sized.prompts[0].media) == 8
    absent = dataset([row], chat_template="/nowhere.jinja")
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        ask(service, opening(sources=(absent,)), DataChecked)


def test_a_bad_row_is_an_error_that_names_it(service: InputService, opening: Opening, dataset: Dataset) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:2 \(row 1\)"):
        service.handle(
            opening(sources=(dataset([ROWS[1], {"prompt": "a", "images": ["a.png"]}]),)),
            lambda _: pytest.fail("answered"),
        )
    with pytest.raises(ModelError):
        service.handle(
            OpenData(cause=1, model_path="/nowhere", sources=(), never_sample=(), stop_tokens=()),
            lambda _: pytest.fail("answered"),
        )


def test_what_is_written_is_what_was_prepared(
    service: InputService, opening: Opening, holder: Holder, dataset: Dataset, maker: PromptMaker, rules: Rules
) -> None:
    ask(service, opening(), DataChecked)
    sized = ask(service, PrepareInputs(cause=2, step=4, source="train", rows=(2, 0, 1)), InputsSized)
    ref = holder.create(9, sized.size_bytes)
    written = ask(service, WriteInputs(cause=3, step=4, segment=ref), InputsWritten)
    assert (sized.cause, sized.step, written.cause, written.step) == (2, 4, 3, 4)
    assert holder.events == ["attach 9", "detach 9"]
    assert [(slot.group, slot.row) for slot in sized.prompts] == [(0, 2), (1, 0), (2, 1)]
    content, ends = holder.content(ref), [0]
    for slot in sized.prompts:
        expected = Source(dataset(ROWS), maker, rules).prepare(slot.row)
        ids = np.frombuffer(content, np.int64, slot.tokens, slot.ids_offset)
        positions = np.frombuffer(content, np.int64, 3 * slot.tokens, slot.positions_offset)
        assert np.array_equal(ids, expected.prompt.ids)
        assert np.array_equal(positions.reshape(3, -1), expected.prompt.positions)
        assert slot.next_position == expected.prompt.next_position
        starts = [slot.ids_offset, slot.positions_offset, *(medium.offset for medium in slot.media)]
        assert all(start % ALIGN_BYTES == 0 for start in starts)
        sizes = [8 * slot.tokens, 24 * slot.tokens, *(4 * medium.rows * 1176 for medium in slot.media)]
        for start, size in zip(starts, sizes, strict=True):
            assert ends[-1] <= start < ends[-1] + ALIGN_BYTES
            ends.append(start + size)
        for medium, patches in zip(slot.media, expected.media, strict=True):
            rows = np.frombuffer(content, np.float32, medium.rows * 1176, medium.offset)
            assert np.array_equal(rows.reshape(medium.rows, 1176), patches.numbers())
    assert ends[-1] <= sized.size_bytes < ends[-1] + ALIGN_BYTES


def test_rows_are_shown_whatever_is_wrong_with_one(service: InputService, opening: Opening) -> None:
    ask(service, opening(), DataChecked)
    shown = ask(service, ShowRows(cause=5, step=50, source="train", rows=(2, 9, 0)), RowsShown)
    assert (shown.cause, shown.step) == (5, 50)
    assert [row.row for row in shown.rows] == [2, 9, 0]
    assert [item.name for item in shown.rows[0].media] == ["image 1", "video 1"]
    assert "no such row" in shown.rows[1].problem
    assert shown.rows[2].media[0].png.startswith(b"\x89PNG")
    INPUT_CHANNEL.from_worker.encode(shown)
    with pytest.raises(StateError, match="No such dataset"):
        ask(service, ShowRows(cause=5, step=50, source="other", rows=(0,)), RowsShown)


def test_steps_are_prepared_ahead_and_written_in_any_order(
    service: InputService, opening: Opening, holder: Holder
) -> None:
    ask(service, opening(), DataChecked)
    sizes = {
        step: ask(service, PrepareInputs(cause=step, step=step, source="train", rows=(row,)), InputsSized)
        for step, row in ((0, 1), (1, 0))
    }
    for step in (1, 0):
        ref = holder.create(step, sizes[step].size_bytes)
        ask(service, WriteInputs(cause=9, step=step, segment=ref), InputsWritten)
        slot = sizes[step].prompts[0]
        ids = np.frombuffer(holder.content(ref), np.int64, slot.tokens, slot.ids_offset)
        assert ids.min() > 0
    with pytest.raises(StateError, match="not prepared"):
        ask(service, WriteInputs(cause=9, step=0, segment=holder.create(5, 64)), InputsWritten)


def test_a_step_that_is_prepared_again_is_the_same(service: InputService, opening: Opening) -> None:
    ask(service, opening(), DataChecked)
    message = PrepareInputs(cause=2, step=0, source="train", rows=(0, 2))
    assert ask(service, message, InputsSized) == ask(service, message, InputsSized)


def test_instructions_out_of_order_are_refused(service: InputService, opening: Opening, holder: Holder) -> None:
    with pytest.raises(StateError, match="No such dataset"):
        ask(service, PrepareInputs(cause=2, step=0, source="train", rows=(0,)), InputsSized)
    ask(service, opening(), DataChecked)
    with pytest.raises(DataError, match="no such row"):
        ask(service, PrepareInputs(cause=2, step=0, source="train", rows=(3,)), InputsSized)
    ask(service, PrepareInputs(cause=2, step=0, source="train", rows=(0,)), InputsSized)
    with pytest.raises(SegmentError, match="too small"):
        ask(service, WriteInputs(cause=3, step=0, segment=holder.create(1, 64)), InputsWritten)
    service.handle(Leave(reason="done"), lambda _: pytest.fail("answered"))


def test_a_buffer_that_is_too_small_is_left_alone(dataset: Dataset, maker: PromptMaker, rules: Rules) -> None:
    from rollplex.data.inputs import lay_out

    prepared = [Source(dataset(ROWS), maker, rules).prepare(1)]
    slots, size = lay_out(prepared)
    small = bytearray(size - 1)
    with pytest.raises(SegmentError):
        write(memoryview(small), prepared, slots)
    assert not any(small)


def test_the_child_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, rollplex.data.child; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
