"""The check of a dataset, and rows as the model takes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image, ImageFile

from rollplex.data.images import Header, ImageFolder
from rollplex.data.order import rows_of_step
from rollplex.data.patches import image_patches
from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.report import examine
from rollplex.data.source import Source
from rollplex.data.source import open_source as open_for
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import DataError
from rollplex.protocol.inputs import DataSource

Dataset = Callable[..., DataSource]
ROWS: list[object] = [
    {"prompt": [{"role": "user", "content": "what is the colour?"}], "images": ["a.png"], "answer": "red"},
    {"prompt": "plain text of one row"},
    {
        "prompt": "<image> and <video>, <image>",
        "images": ["b.jpg", "a.png"],
        "videos": [[f"f{i}.png" for i in range(5)]],
    },
]


@pytest.fixture
def open_source(maker: PromptMaker, rules: Rules) -> Callable[[DataSource], Source]:
    return lambda source: Source(source, maker, rules)


Open = Callable[[DataSource], Source]


def test_the_check_counts_exactly_what_the_rows_will_need(dataset: Dataset, open_source: Open) -> None:
    source = open_source(dataset(ROWS))
    checked = source.check()
    prepared = [source.prepare(number) for number in range(3)]
    assert checked.num_rows == 3
    assert checked.good_rows is None
    assert checked.rejected == ()
    assert checked.max_prompt_tokens == max(len(item.prompt.ids) for item in prepared)
    media_rows = [sum(patches.grid.rows for patches in item.media) for item in prepared]
    assert checked.max_media_rows == max(media_rows) > 0
    assert checked.max_media_tokens == max(media_rows) // 4


def test_the_check_says_which_columns_the_good_rows_have(dataset: Dataset, open_source: Open) -> None:
    rows: list[object] = [
        {"prompt": "", "never": 1},
        {"prompt": "a", "answer": None, "level": 1},
        {"prompt": "b", "answer": "x", "completion": "c"},
    ]
    checked = open_source(replace(dataset(rows), skip_bad_rows=True)).check()
    assert checked.columns is not None
    assert [(column.name, column.rows) for column in checked.columns] == [("answer", 2), ("level", 1)]
    assert checked.columns[0].place == ""
    assert checked.columns[1].place.endswith(":3 (row 2)")
    assert checked.place.endswith(":2 (row 1)")
    assert checked.num_good == 2
    assert checked.answers is not None
    assert (checked.answers.rows, checked.answers.place) == (1, checked.place)  # null is a value, but no answer


def test_the_check_decodes_nothing_of_whole_files(
    dataset: Dataset, open_source: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    assert open_source(dataset(ROWS)).check().num_rows == 3


def test_media_are_in_the_order_of_their_placeholders(
    dataset: Dataset, open_source: Open, rules: Rules, images: Path
) -> None:
    first, video, second = open_source(dataset(ROWS)).prepare(2).media
    with Image.open(images / "b.jpg") as b, Image.open(images / "a.png") as a:
        assert np.array_equal(first.numbers(), image_patches(b.convert("RGB"), rules.image).numbers())
        assert np.array_equal(second.numbers(), image_patches(a.convert("RGB"), rules.image).numbers())
    assert video.grid.frames == 3


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b"{", "not JSON"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "not as many places"),
        ({"prompt": "a<image>", "images": ["absent.png"]}, "No such file"),
        ({"prompt": "a<image>", "images": ["../train.jsonl"]}, "out of the image folder"),
        ({"prompt": "a<image>", "images": ["http://localhost/x.png"]}, "a URL"),
        ({"prompt": "a<image>", "images": ["thin.png"]}, "200:1"),
        ({"prompt": "a<image>", "images": ["large.png"]}, "too many pixels"),
        ({"prompt": "a<image>", "images": ["cut.jpg"]}, "cannot be read"),
        ({"prompt": "word " * 200}, "too long; got 1000 tokens"),
        ({"prompt": "a<video>", "videos": [["f0.png", "a.png"]]}, "differ in size"),
    ],
)
def test_a_bad_row_is_named_at_the_check_or_left_out(
    row: object, says: str, dataset: Dataset, open_source: Open, images: Path, picture: Callable[..., Image.Image]
) -> None:
    picture(300, 1, 0).save(images / "thin.png")
    picture(300, 300, 0).save(images / "large.png")
    (images / "cut.jpg").write_bytes((images / "b.jpg").read_bytes()[:-50])
    rows = [ROWS[1], row, ROWS[0]]
    limits = {"max_prompt_tokens": 120, "max_image_pixels": 299 * 300}
    with pytest.raises(DataError) as caught:
        open_source(dataset(rows, **limits)).check()
    assert "train.jsonl:2 (row 1): " in str(caught.value)
    assert says in str(caught.value)
    source = open_source(dataset(rows, **limits, skip_bad_rows=True))
    checked = source.check()
    assert checked.good_rows == (0, 2)
    assert checked.rejected == (str(caught.value),)
    assert source.prepare(2).row == 2
    with pytest.raises(DataError, match=r"row 1\)"):
        source.prepare(1)


def test_a_row_that_only_decoding_shows_to_be_bad_is_left_out_or_named_later(
    dataset: Dataset, open_source: Open, images: Path
) -> None:
    content = bytearray((images / "f0.png").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (images / "f0.png").write_bytes(bytes(content))
    rows = [ROWS[1], {"prompt": "<image>", "images": ["f0.png"]}]
    strict = open_source(dataset(rows))
    strict.check()
    with pytest.raises(DataError, match=r"train.jsonl:2 \(row 1\): This image cannot be read"):
        strict.prepare(1)
    assert open_source(dataset(rows, skip_bad_rows=True)).check().good_rows == (0,)


def test_a_dataset_without_a_good_row_is_refused(dataset: Dataset, open_source: Open) -> None:
    with pytest.raises(DataError, match=r"no good row; got 2 bad ones, the first: .*row 0"):
        open_source(dataset([b"{", b"["], skip_bad_rows=True)).check()


def test_many_bad_rows_are_counted_and_not_all_listed(dataset: Dataset, open_source: Open) -> None:
    checked = open_source(dataset([*[b"{"] * 1200, ROWS[1]], skip_bad_rows=True)).check()
    assert len(checked.rejected) == 1000
    assert checked.rejected[-1] == "… and 201 more"
    assert checked.good_rows is not None
    assert checked.good_rows == (1200,)
    assert rows_of_step(0, 1, checked.good_rows, seed=0, shuffle=True) == (1200,)


def test_the_same_prompt_twice_is_two_rows(dataset: Dataset, open_source: Open) -> None:
    source = open_source(dataset([ROWS[1], ROWS[1]]))
    assert source.check().good_rows is None
    assert [source.prepare(number).row for number in (0, 1)] == [0, 1]


def test_the_fingerprint_follows_rows_and_images_and_not_places_or_dates(
    dataset: Dataset, open_source: Open, images: Path, tmp_path: Path
) -> None:
    first = open_source(dataset(ROWS)).check().fingerprint
    assert open_source(dataset(ROWS, skip_bad_rows=True)).check().fingerprint == first
    images.rename(tmp_path / "elsewhere")
    images.symlink_to(tmp_path / "elsewhere")
    assert open_source(dataset(ROWS, name="other")).check().fingerprint == first
    assert open_source(dataset(list(reversed(ROWS)))).check().fingerprint != first
    (images / "a.png").write_bytes((images / "f1.png").read_bytes())
    assert open_source(dataset(ROWS)).check().fingerprint != first


def test_the_fingerprint_follows_what_is_put_around_the_rows(
    dataset: Dataset, tokenizer: TextTokenizer, model_folder: Path, tmp_path: Path
) -> None:
    row = {"problem": "q", "answer": "a"}
    (tmp_path / "format.jinja").write_text("{{ content }}!")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    own = {
        "none": dataset([row]),
        "format": dataset([row], format_prompt=str(tmp_path / "format.jinja")),
        "chat": dataset([row], chat_template=str(tmp_path / "chat.jinja")),
    }
    found = {name: open_for(source, model_folder, tokenizer).check().fingerprint for name, source in own.items()}
    assert len(set(found.values())) == 3
    for file in ("format.jinja", "chat.jinja"):
        with (tmp_path / file).open("a") as opened:
            opened.write("?")
    after = {name: open_for(source, model_folder, tokenizer).check().fingerprint for name, source in own.items()}
    assert [name for name in own if after[name] != found[name]] == ["format", "chat"]
    for name, source in own.items():
        assert examine(source, model_folder, decode=False).fingerprint == after[name]


def test_an_image_that_changes_after_the_check_is_noticed(dataset: Dataset, open_source: Open, images: Path) -> None:
    source = open_source(dataset(ROWS))
    source.check()
    (images / "a.png").write_bytes((images / "b.jpg").read_bytes())
    with pytest.raises(DataError, match=r"row 0\): This row is not what it was"):
        source.prepare(0)


def test_an_image_of_many_rows_is_opened_once(
    dataset: Dataset, open_source: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    header = ImageFolder.header

    def count(folder: ImageFolder, name: str, *, decode: bool = False) -> Header:
        opened.append(name)
        return header(folder, name, decode=decode)

    monkeypatch.setattr(ImageFolder, "header", count)
    open_source(dataset(ROWS * 50)).check()
    assert sorted(opened) == ["a.png", "b.jpg", *(f"f{frame}.png" for frame in range(5))]


def test_rows_are_the_same_each_time(dataset: Dataset, open_source: Open) -> None:
    first, second = (open_source(dataset(ROWS)).prepare(2) for _ in range(2))
    assert np.array_equal(first.prompt.positions, second.prompt.positions)
    assert all(np.array_equal(a.raw, b.raw) for a, b in zip(first.media, second.media, strict=True))
    assert json.dumps(first.prompt.ids.tolist()) == json.dumps(second.prompt.ids.tolist())
