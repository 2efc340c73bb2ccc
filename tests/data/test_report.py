"""What the check of a whole dataset finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from rollplex.data import report as module
from rollplex.data.checking import RowFacts
from rollplex.data.noticed import Noticed
from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.report import Bar, Report, examine, histogram
from rollplex.data.source import Source
from rollplex.errors import DataError
from rollplex.protocol.inputs import DataSource

Dataset = Callable[..., DataSource]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ROWS: list[object] = [
    {"prompt": user("<image>what is the colour?"), "images": ["a.png"]},
    {"prompt": user("red<image>"), "images": []},
    {"prompt": user("<image>and <image>"), "images": ["b.jpg", "a.png"]},
    {"prompt": user("<image>what is the colour?"), "images": ["a.png"], "answer": "again"},
    {"prompt": user("<video>?"), "videos": [[f"f{frame}.png" for frame in range(5)]]},
]
BAD: list[object] = [
    b"{",
    {"prompt": user("<image><image>"), "images": ["a.png"]},
    {"prompt": user("?"), "images": ["absent.png"]},
    {"prompt": user("?"), "images": ["gone.png"]},
    {"prompt": user("word " * 300)},
]


def test_a_good_dataset_is_counted_as_a_run_counts_it(
    dataset: Dataset, model_folder: Path, maker: PromptMaker, rules: Rules
) -> None:
    source = dataset(ROWS)
    report = examine(source, model_folder, decode=True)
    checked = Source(source, maker, rules).check()
    assert (report.rows, report.good_rows, report.num_errors) == (5, 5, 0)
    assert (report.format, report.shape, report.columns) == ("JSON lines", "trl", ("prompt", "images"))
    assert report.fingerprint == checked.fingerprint
    assert report.prompt_tokens is not None
    assert report.media_tokens is not None
    assert report.prompt_tokens.most == checked.max_prompt_tokens
    assert report.media_tokens.most == checked.max_media_tokens
    assert sum(bar.count for bar in report.prompt_tokens.bars) == 5
    assert sum(bar.count for bar in report.media_tokens.bars) == 4
    assert (report.images, report.videos, report.rows_without_media) == (4, 1, 1)
    assert (report.smallest_image, report.largest_image) == ((60, 84), (112, 56))
    assert report.image_sides is not None
    assert report.image_sides.bars == (Bar(low=64, high=127, count=4),)
    assert report.video_frames is not None
    assert (report.video_frames.least, report.video_frames.most) == (5, 5)


def test_the_first_prompt_is_shown_with_its_media_counted(dataset: Dataset, model_folder: Path) -> None:
    rows = [BAD[0], ROWS[2], ROWS[4]]
    first = examine(dataset(rows), model_folder, decode=False).first
    assert first is not None
    assert first.row == 1
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>and <|vision_start|><|image_pad|>" in first.text
    assert first.marked.endswith(
        "<|im_start|>user\n<|vision_start|>[image 1: 8 tokens]<|vision_end|>and "
        "<|vision_start|>[image 2: 6 tokens]<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    video = examine(dataset(ROWS[4:]), model_folder, decode=False).first
    assert video is not None
    assert "<|vision_start|>[video 1: 12 tokens]<|vision_end|>?" in video.marked
    assert video.tokens > 12


def test_bad_rows_are_listed_with_their_reasons_and_the_good_ones_counted(dataset: Dataset, model_folder: Path) -> None:
    report = examine(dataset([*BAD, *ROWS], max_prompt_tokens=1000), model_folder, decode=True)
    assert (report.rows, report.good_rows, report.num_errors) == (10, 5, 5)
    assert [problem.row for problem in report.errors] == [0, 1, 2, 3, 4]
    assert report.kinds == {
        "This line is not JSON": 1,
        "The prompt has not as many places for images as the row has images": 1,
        "This file cannot be opened": 2,
        "This prompt is too long": 1,
    }
    assert report.errors[1].where.endswith("train.jsonl:2 (row 1)")
    assert (report.errors[1].got, report.errors[1].needed) == (
        "2 in the rendered prompt",
        '1, the length of "images"',
    )


def test_what_a_run_leaves_out_is_what_the_report_calls_an_error(
    dataset: Dataset, model_folder: Path, maker: PromptMaker, rules: Rules
) -> None:
    source = dataset([*BAD, *ROWS], max_prompt_tokens=1000, skip_bad_rows=True)
    report = examine(source, model_folder, decode=True)
    rejected = Source(source, maker, rules).check().rejected
    assert [f"{problem.where}: {problem.what}" for problem in report.errors] == [
        reason.partition("; got")[0] for reason in rejected
    ]


def test_odd_rows_are_warnings(dataset: Dataset, model_folder: Path) -> None:
    report = examine(dataset(ROWS), model_folder, decode=False)
    assert report.warnings == (
        "<image> stands in the text of 1 row (1) without images, and is taken as text",
        "1 row (3) repeats the prompt and the media of another, e.g. row 3 those of row 0",
    )
    assert report.duplicates == ((0, 3),)


def test_a_run_is_warned_of_marks_that_are_text(dataset: Dataset, maker: PromptMaker, rules: Rules) -> None:
    checked = Source(dataset(ROWS), maker, rules).check()
    assert checked.warnings == ("<image> stands in the text of 1 row (1) without images, and is taken as text",)


def test_the_same_prompt_with_another_picture_is_no_duplicate(dataset: Dataset, model_folder: Path) -> None:
    rows = [{"prompt": user("<image>?"), "images": [name]} for name in ("a.png", "b.jpg", "f0.png")]
    assert examine(dataset(rows), model_folder, decode=False).duplicates == ()


def test_sentences_name_a_few_rows_only() -> None:
    noticed = Noticed()
    for number in range(8):
        noticed.add(RowFacts(images=(), videos=(), literal=("<video>",), identity=b"same"), number)
    marks, repetitions = noticed.sentences()
    assert marks.startswith("<video> stands in the text of 8 rows (0, 1, 2, 3, 4, …) without videos")
    assert repetitions.startswith(
        "7 rows (1, 2, 3, 4, 5, …) repeat the prompt and the media of another, e.g. row 1 those"
    )


def test_without_a_model_images_are_checked_and_tokens_are_not(dataset: Dataset) -> None:
    report = examine(dataset([*ROWS, BAD[2], BAD[1]]), None, decode=True)
    assert (report.good_rows, report.num_errors) == (6, 1)
    assert report.prompt_tokens is None
    assert report.first is not None
    assert report.first.text == '[{"role":"user","content":"<image>what is the colour?"}]'
    assert report.first.marked == ""


def test_images_are_decoded_only_if_asked(dataset: Dataset, images: Path) -> None:
    content = bytearray((images / "a.png").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (images / "a.png").write_bytes(bytes(content))
    assert examine(dataset(ROWS[:1]), None, decode=False).num_errors == 0
    assert examine(dataset(ROWS[:1]), None, decode=True).kinds == {"This image cannot be read": 1}


def test_a_dataset_without_good_rows_is_a_report_and_not_an_error(dataset: Dataset, model_folder: Path) -> None:
    report = examine(dataset([b"{", b"["]), model_folder, decode=True)
    assert (report.good_rows, report.num_errors, report.first) == (0, 2, None)
    assert (report.image_sides, report.prompt_tokens, report.media_tokens) == (None, None, None)


def test_a_dataset_of_no_shape_is_an_error_as_a_whole(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="fit no known shape"):
        examine(dataset([{"query": "q"}]), None, decode=True)


def test_so_many_errors_are_listed_and_all_are_counted(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ERRORS", 3)
    report = examine(dataset([*[b"{"] * 7, ROWS[1]]), None, decode=True)
    assert (len(report.errors), report.num_errors) == (3, 7)


def test_a_report_survives_json(dataset: Dataset, model_folder: Path) -> None:
    report = examine(dataset([*ROWS, *BAD]), model_folder, decode=True)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([7], [(7, 7, 1)]),
        ([3, 4, 4, 5], [(3, 3, 1), (4, 4, 2), (5, 5, 1)]),
        (
            [100, 119, 120, 1000],
            [(100, 199, 3), *[(low, low + 99, 0) for low in range(200, 1000, 100)], (1000, 1099, 1)],
        ),
    ],
)
def test_a_histogram_has_few_bars_of_one_round_width(values: list[int], bars: list[tuple[int, ...]]) -> None:
    found = histogram(values)
    assert found is not None
    assert [(bar.low, bar.high, bar.count) for bar in found.bars] == bars


def test_a_histogram_of_sizes_doubles() -> None:
    found = histogram([1, 28, 28, 300], doubling=True)
    assert found is not None
    assert [(bar.low, bar.high, bar.count) for bar in found.bars] == [
        (1, 1, 1),
        (2, 3, 0),
        (4, 7, 0),
        (8, 15, 0),
        (16, 31, 2),
        (32, 63, 0),
        (64, 127, 0),
        (128, 255, 0),
        (256, 511, 1),
    ]
    assert histogram([]) is None


def test_every_value_is_in_a_bar(picture: Callable[[int, int, int], Image.Image]) -> None:
    for doubling in (False, True):
        for values in ([0], [0, 5], [1023, 1024, 1025], [3, 77_777], list(range(50))):
            found: Any = histogram(values, doubling=doubling)
            assert sum(bar.count for bar in found.bars) == len(values)
