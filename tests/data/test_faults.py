"""Faults of datasets, one table: each through the check that a run starts with, each with its whole sentence."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollplex.data.child import InputService
from rollplex.data.images import ImageFolder
from rollplex.data.order import rows_of_step
from rollplex.data.patches import image_grid
from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.source import Source
from rollplex.errors import DataError
from rollplex.layout.shape import ModelShape
from rollplex.protocol.inputs import DataSource, InputsSized, OpenData, PrepareInputs

Dataset = Callable[..., DataSource]
Picture = Callable[[int, int, int], Image.Image]
GOOD: dict[str, object] = {"prompt": [{"role": "user", "content": "<image>?"}], "images": ["a.png"]}


def said(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def typed(kind: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "?"}]}]


def with_image(image: object) -> dict[str, object]:
    return {"prompt": said("<image>?"), "images": [image]}


PLACES = (
    "The prompt has not as many places for images as the row has images; got {} in the rendered prompt; needed {}, "
)
WRITE = 'the length of "images". Write <image> or a part {"type": "image"} where each belongs.'
ADD = 'the length of "images". Add the column "images", or take the places out.'
FORMS = 'needed a path, {"path": …} or {"bytes": …}'
NO_PATH = "; needed a path relative to image_dir"
OUT = (
    "; needed a file under {folder}, symbolic links followed. "
    "Move the file there, or set image_dir to a folder above it."
)

FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "fewer places than images": (
        {"prompt": said("<image>?"), "images": ["a.png", "b.jpg"]},
        PLACES.format(1, 2) + WRITE,
    ),
    "more places than images": (
        {"prompt": said("<image>, <image>?"), "images": ["a.png"]},
        PLACES.format(2, 1) + WRITE,
    ),
    "a plain text without places": ({"prompt": "what?", "images": ["a.png"]}, PLACES.format(0, 1) + WRITE),
    "more places than videos": (
        {"prompt": said("<video><video>"), "videos": [["f0.png"]]},
        (
            "The prompt has not as many places for videos as the row has videos; got 2 in the rendered prompt; "
            'needed 1, the length of "videos". Write <video> or a part {"type": "video"} where each belongs.'
        ),
    ),
    "a typed place, images missing": ({"prompt": typed("image")}, PLACES.format(1, 0) + ADD),
    "a typed place, images null": ({"prompt": typed("image"), "images": None}, PLACES.format(1, 0) + ADD),
    "a typed place, images []": ({"prompt": typed("image"), "images": []}, PLACES.format(1, 0) + ADD),
    "a typed place, image null": ({"prompt": typed("image"), "image": None}, PLACES.format(1, 0) + ADD),
    "a media token as text": ({"prompt": said("<|image_pad|>?")}, PLACES.format(1, 0) + ADD),
    "images [null]": (
        {"prompt": said("<image>?"), "images": [None]},
        f'"images"[0] is empty; got nothing; {FORMS}. Take it out, and its place too.',
    ),
    "images [path, null]": (
        {"prompt": said("<image>?"), "images": ["a.png", None]},
        f'"images"[1] is empty; got nothing; {FORMS}. Take it out, and its place too.',
    ),
    "images under another name": (
        {"prompt": said("<image>?"), "image_s": ["a.png"]},
        PLACES.format(1, 0) + 'the length of "images". Rename "image_s" to "images".',
    ),
    "images twice": (
        {"prompt": said("<image>?"), "images": ["a.png"], "image": "a.png"},
        'This row has both "image" and "images"; needed one of them',
    ),
    "images without a user": (
        {"prompt": [{"role": "system", "content": "s"}], "images": ["a.png"]},
        'The row has media, but no user message to put them in; needed a message with "role": "user"',
    ),
    "a file of no bytes": (
        with_image("zero.png"),
        "This file is empty; got 'zero.png', 0 bytes; needed 1 to 1073741824 bytes",
    ),
    "bytes of no length": (
        with_image({"bytes": ""}),
        "This file is empty; got '\"images\"[0]', 0 bytes; needed 1 to 1073741824 bytes",
    ),
    "a truncated PNG": (
        with_image("cut.png"),
        "This image cannot be read; got 'cut.png': image file is truncated; needed a whole image file",
    ),
    "a text called PNG": (
        with_image("text.png"),
        "This is not an image; got 'text.png'; needed one of PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM",
    ),
    "floats": (
        with_image("float.tif"),
        (
            "This image has numbers of 32 bits, whose range is not known; got 'float.tif', mode F; "
            "needed 8 or 16 bits a channel"
        ),
    ),
    "3 x 3000 pixels": (
        with_image("thin.png"),
        "This image is too narrow for the model; got 3 x 3000; needed a ratio of at most 200:1. Crop it.",
    ),
    "12000 x 9000 pixels": (
        with_image("huge.png"),
        (
            "This image declares too many pixels; got 'huge.png': Image size (108000000 pixels) exceeds limit of "
            "89478485 pixels, could be decompression bomb DOS attack. Scale it down."
        ),
    ),
    "4100 x 4100 pixels": (
        with_image("large.png"),
        (
            "This image declares too many pixels; got 'large.png', 4100 x 4100 = 16810000; needed at most 16777216. "
            "Scale it down, or raise data.max_image_pixels."
        ),
    ),
    "no such file": (
        with_image("absent.png"),
        "This file cannot be opened; got 'absent.png': No such file or directory; needed a readable file",
    ),
    "a path with ..": (
        with_image("../secret.png"),
        "This path leads out of the image folder; got '../secret.png'" + OUT,
    ),
    "an absolute path": (
        with_image("/etc/hostname"),
        "This is not the path of an image; got '/etc/hostname', an absolute path" + NO_PATH,
    ),
    "a link that leads out": (with_image("out.png"), "This path leads out of the image folder; got 'out.png'" + OUT),
    "a FIFO": (with_image("fifo"), "This is not a file; got 'fifo', a FIFO; needed a regular file"),
    "an http URL": (
        with_image("http://169.254.169.254/x.png"),
        "This is not the path of an image; got 'http://169.254.169.254/x.png', a URL; nothing is fetched" + NO_PATH,
    ),
    "an https URL in an object": (
        with_image({"path": "https://example.org/x.png"}),
        "This is not the path of an image; got 'https://example.org/x.png', a URL; nothing is fetched" + NO_PATH,
    ),
    "a file URL": (
        with_image({"image": "file:///etc/passwd"}),
        "This is not the path of an image; got 'file:///etc/passwd', a URL; nothing is fetched" + NO_PATH,
    ),
    "an empty path": (with_image(""), "This is not the path of an image; got an empty name" + NO_PATH),
    "a path with NUL": (
        with_image("a\0.png"),
        "This is not the path of an image; got 'a\\x00.png', with a NUL character" + NO_PATH,
    ),
    "what is no base64": (
        with_image({"bytes": "@@@"}),
        "\"images\"[0] is not base64; got text: '@@@': Only base64 data is allowed; needed base64",
    ),
    "a data URI that is not base64": (
        with_image("data:image/png,abc"),
        "\"images\"[0] is a data URI that cannot be read; got 'data:image/png,abc'; needed data:…;base64,…",
    ),
    "an object of another form": (
        with_image({"url": "x.png"}),
        f"\"images\"[0] has the wrong form; got an object: {{'url': 'x.png'}}; {FORMS}",
    ),
    "an object of nulls": (
        with_image({"bytes": None, "path": None}),
        f'"images"[0] has the wrong form; got an object: {{}}; {FORMS}',
    ),
    "frames of two sizes": (
        {"prompt": said("<video>"), "videos": [["f0.png", "a.png"]]},
        "The frames of a video differ in size; got 'a.png', 60 x 84; needed 64 x 64, as its first frame",
    ),
    "a prompt of blanks": ({"prompt": " \n"}, "The prompt is empty; got ' \\n'"),
    "eight images that are too many": (
        {"prompt": said("<image>" * 8), "images": ["a.png"] * 8},
        (
            "This prompt is too long; got 93 tokens, 48 of them for images and videos; needed at most 92. "
            "Shorten it, scale its images down, or raise data.max_prompt_tokens."
        ),
    ),
}


def png(width: int, height: int) -> bytes:
    """A whole black PNG, whatever its size, in little memory."""
    packer = zlib.compressobj(1)
    row = b"\0" * (1 + width * 3)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def huge() -> bytes:
    return png(12_000, 9_000)


@pytest.fixture
def odd(images: Path, huge: bytes) -> Path:
    """The image folder with all that the table names."""
    (images.parent / "secret.png").write_bytes((images / "a.png").read_bytes())
    (images / "out.png").symlink_to(images.parent / "secret.png")
    os.mkfifo(images / "fifo")
    (images / "zero.png").touch()
    (images / "cut.png").write_bytes((images / "a.png").read_bytes()[:5000])
    (images / "text.png").write_text("no picture")
    (images / "huge.png").write_bytes(huge)
    (images / "large.png").write_bytes(png(4100, 4100))
    Image.new("RGB", (3, 3000)).save(images / "thin.png")
    Image.new("F", (4, 4)).save(images / "float.tif")
    return images


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_before_the_run_with_its_row_and_leaves_the_others_good(
    name: str, odd: Path, dataset: Dataset, maker: PromptMaker, rules: Rules
) -> None:
    row, sentence = FAULTS[name]
    limit = {"max_prompt_tokens": 92} if "too many" in name else {}
    strict = dataset([GOOD, row, GOOD], **limit)
    with pytest.raises(DataError) as caught:
        Source(strict, maker, rules).check()
    where = f"{strict.path}:2 (row 1): "
    assert str(caught.value) == where + sentence.replace("{folder}", str(odd))
    lenient = Source(dataset([GOOD, row, GOOD], skip_bad_rows=True, **limit), maker, rules)
    checked = lenient.check()
    assert (checked.good_rows, checked.rejected) == ((0, 2), (str(caught.value),))
    with pytest.raises(DataError, match=r"\(row 1\)"):
        lenient.prepare(1)


def test_a_mark_in_a_row_of_text_is_text(dataset: Dataset, maker: PromptMaker, rules: Rules, shape: ModelShape) -> None:
    without: list[dict[str, object]] = [{}, {"images": None}, {"images": []}, {"image": None, "videos": []}]
    for media in without:
        source = Source(dataset([{"prompt": said("what is an <image> or a <video>?"), **media}]), maker, rules)
        checked = source.check()
        assert [warning.partition(" stands")[0] for warning in checked.warnings] == ["<image>", "<video>"]
        ids = source.prepare(0).prompt.ids
        assert not {shape.image_id, shape.video_id, shape.vision_start_id} & set(ids.tolist())
        assert "what is an <image> or a <video>?" in maker.marked(ids)


@pytest.mark.parametrize("images_of_row", [["b.jpg"], "b.jpg", {"path": "b.jpg"}, [{"bytes": None, "path": "b.jpg"}]])
def test_a_mislabelled_file_is_what_it_holds(
    images_of_row: object, images: Path, dataset: Dataset, maker: PromptMaker, rules: Rules
) -> None:
    (images / "b.jpg").write_bytes((images / "a.png").read_bytes())
    rows = [{"prompt": said("<image>?"), "images": images_of_row}, GOOD]
    source = Source(dataset(rows, skip_bad_rows=True), maker, rules)
    assert source.check().good_rows is None
    assert np.array_equal(source.prepare(0).media[0].raw, source.prepare(1).media[0].raw)


def test_an_image_is_the_same_wherever_it_comes_from(
    images: Path, dataset: Dataset, maker: PromptMaker, rules: Rules, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = (images / "a.png").read_bytes()
    text = base64.b64encode(data).decode()
    forms: list[object] = [
        "a.png",
        {"path": "a.png"},
        {"image": "a.png"},
        {"bytes": text},
        {"bytes": text, "path": "x"},
    ]
    forms += [f"data:image/png;base64,{text}", f"data:;base64,{text}"]
    wrapped = [{**GOOD, "images": value} for form in forms for value in (form, [form])]
    source = Source(dataset([*wrapped, {"prompt": said("<image>?"), "image": "a.png"}]), maker, rules)
    source.check()
    expected = source.prepare(0)
    for number in range(1, len(wrapped) + 1):
        found = source.prepare(number)
        assert np.array_equal(found.media[0].raw, expected.media[0].raw)
        assert np.array_equal(found.prompt.ids, expected.prompt.ids)
    for column in (pa.array([data]), pa.array([{"bytes": data, "path": None}]), pa.array([[data]])):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table({"prompt": pa.array([said("<image>?")]), "images": column}), path)
        table = DataSource(
            name="t",
            path=str(path),
            image_dir=str(images),
            max_prompt_tokens=0,
            max_image_pixels=10**6,
            skip_bad_rows=True,
        )
        opened = Source(table, maker, rules)
        assert opened.check().num_rows == 1
        assert np.array_equal(opened.prepare(0).media[0].raw, expected.media[0].raw)


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (1, 1, (4, 4)),
        (5, 27, (10, 2)),
        (27, 5, (2, 10)),
        (15, 3000, (214, 2)),
        (3000, 15, (2, 214)),
        (28, 28, (4, 4)),
        (56, 57, (4, 4)),
    ],
)
def test_a_small_or_narrow_image_is_scaled_up_to_whole_tokens(
    width: int, height: int, grid: tuple[int, int], images: Path, dataset: Dataset, maker: PromptMaker, rules: Rules
) -> None:
    Image.new("RGB", (width, height), (9, 200, 90)).save(images / "small.png")
    source = Source(dataset([with_image("small.png")]), maker, rules)
    checked = source.check()
    (medium,) = source.prepare(0).media
    assert (medium.grid.height, medium.grid.width) == grid
    assert checked.max_media_tokens == grid[0] * grid[1] // 4
    assert [np.unique(medium.raw[:, channel]).tolist() for channel in range(3)] == [[9], [200], [90]]


def stored(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def palette() -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.putdata([0, 1])
    return image


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGB", (2, 1))
    image.putdata([(250, 0, 0), (0, 0, 250)])
    return stored(image, "PNG", exif=exif)


def row_of(mode: str, *pixels: Any) -> Image.Image:
    image = Image.new(mode, (len(pixels), 1))
    image.putdata(pixels)
    return image


WHITE, BLACK = (255, 255, 255), (0, 0, 0)


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (stored(row_of("RGB", (1, 2, 3), WHITE), "PNG"), [(1, 2, 3), WHITE]),
        (
            stored(row_of("RGBA", (255, 0, 0, 0), (255, 0, 0, 255), (255, 0, 0, 102)), "PNG"),
            [WHITE, (255, 0, 0), (255, 153, 153)],
        ),
        (stored(row_of("RGB", (9, 9, 9), (1, 2, 3)), "PNG", transparency=(9, 9, 9)), [WHITE, (1, 2, 3)]),
        (stored(palette(), "PNG"), [(10, 20, 30), (200, 100, 0)]),
        (stored(palette(), "PNG", transparency=1), [(10, 20, 30), WHITE]),
        (stored(row_of("L", 0, 77, 255), "PNG"), [BLACK, (77, 77, 77), WHITE]),
        (stored(row_of("LA", (77, 255), (77, 0)), "PNG"), [(77, 77, 77), WHITE]),
        (stored(row_of("1", 0, 255), "PNG"), [BLACK, WHITE]),
        (
            stored(Image.fromarray(np.array([[0, 255, 256, 65_535]], np.uint16)), "PNG"),
            [BLACK, BLACK, (1, 1, 1), WHITE],
        ),
        (stored(row_of("CMYK", (0, 255, 255, 0), (0, 0, 0, 255), (0, 0, 0, 0)), "TIFF"), [(255, 0, 0), BLACK, WHITE]),
        (turned(), [(250, 0, 0), (0, 0, 250)]),
    ],
    ids=["RGB", "RGBA", "RGB key", "P", "P key", "L", "LA", "1", "I;16", "CMYK", "EXIF 6"],
)
def test_every_colour_mode_gives_the_pixels_of_the_one_rule(
    data: bytes, pixels: list[tuple[int, int, int]], images: Path
) -> None:
    (images / "odd").write_bytes(data)
    image = ImageFolder(images, 10**6).load("odd")
    assert np.asarray(image).reshape(-1, 3).tolist() == [list(pixel) for pixel in pixels]
    assert image.size == ((1, 2) if data == turned() else (len(pixels), 1))


CHECK = """
import resource, sys
from pathlib import Path
from rollplex.data.images import ImageFolder
from rollplex.errors import DataError

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

folder = ImageFolder(Path(sys.argv[1]), 2**24)
folder.load("a.png")
before = peak()
for read in (folder.header, folder.load):
    try:
        read("huge.png")
        print("read")
    except DataError as error:
        print(error.what)
print(peak() - before)
"""


def test_108_million_pixels_are_refused_and_never_held(odd: Path) -> None:
    command = [sys.executable, "-c", CHECK, str(odd)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    header, load, mebibytes = done.stdout.splitlines()
    assert (header, load) == ("This image declares too many pixels",) * 2
    assert int(mebibytes) < 200  # its pixels alone are 309 MiB


@pytest.mark.parametrize("limit", [93, 92, 60, 40])
def test_a_prompt_is_whole_or_refused_and_never_cut(
    limit: int, dataset: Dataset, maker: PromptMaker, rules: Rules, shape: ModelShape
) -> None:
    row = {"prompt": said("<image>" * 8), "images": ["a.png"] * 8}
    source = Source(dataset([GOOD, row], max_prompt_tokens=limit, skip_bad_rows=True), maker, rules)
    checked = source.check()
    if limit < 93:
        assert checked.good_rows == (0,)
        return
    prepared = source.prepare(1)
    assert (len(prepared.prompt.ids), checked.max_prompt_tokens) == (93, 93)
    assert maker.marked(prepared.prompt.ids).count(": 6 tokens]<|vision_end|>") == 8


def test_a_prime_number_of_rows_is_gone_through_whatever_a_step_takes() -> None:
    for prompts in (1, 2, 3, 4, 8, 13):
        for shuffle in (True, False):
            steps = [rows_of_step(step, prompts, 13, seed=1, shuffle=shuffle) for step in range(30)]
            assert all(len(set(rows)) == prompts for rows in steps)
            assert {number for rows in steps for number in rows} == set(range(13))


COLOURS = {"red": (240, 0, 0), "green": (0, 240, 0), "blue": (0, 0, 240), "white": WHITE, "black": BLACK}


def seen(raw: np.ndarray[Any, Any]) -> str:
    """The colour of a medium of one colour."""
    found = tuple(int(np.unique(raw[:, channel]).item()) for channel in range(3))
    return next(name for name, colour in COLOURS.items() if colour == found)


def test_images_of_a_batch_stay_with_their_rows_and_in_their_order(
    images: Path, dataset: Dataset, model_folder: Path, maker: PromptMaker, rules: Rules
) -> None:
    for name, colour in COLOURS.items():
        Image.new("RGB", (56, 28 * (1 + len(name))), colour).save(images / f"{name}.png")
    wanted: list[Sequence[str]] = [[], ["red"], ["blue", "green"], list(COLOURS), ["black", "red"], [], ["green"]]
    rows = [
        {"prompt": said("?" + "<image>" * len(names)), "images": [f"{name}.png" for name in names]} for names in wanted
    ]
    source = dataset(rows)
    answers: list[Any] = []
    service = InputService(None)  # type: ignore[arg-type] # no segment is written
    opening = OpenData(cause=1, model_path=str(model_folder), sources=(source,), never_sample=(), stop_tokens=())
    service.handle(opening, answers.append)
    order = (3, 0, 6, 2, 5, 4, 1)
    service.handle(PrepareInputs(cause=2, step=0, source="train", rows=order), answers.append)
    sized = answers[-1]
    assert isinstance(sized, InputsSized)
    assert [slot.row for slot in sized.prompts] == list(order)
    reader = Source(source, maker, rules)
    for slot in sized.prompts:
        media = reader.prepare(slot.row).media
        assert [seen(medium.raw) for medium in media] == list(wanted[slot.row])
        grids = [image_grid(28 * (1 + len(name)), 56, rules.image) for name in wanted[slot.row]]
        assert [(medium.height, medium.width) for medium in slot.media] == [(grid.height, grid.width) for grid in grids]


def test_a_row_is_never_longer_than_what_was_promised(dataset: Dataset, maker: PromptMaker, rules: Rules) -> None:
    rows = [
        {"prompt": said("x" * number + "<image>" * (number % 4)), "images": ["a.png"] * (number % 4)}
        for number in range(1, 12)
    ]
    source = Source(dataset(rows), maker, rules)
    checked = source.check()
    prepared = [source.prepare(number) for number in range(len(rows))]
    assert max(len(item.prompt.ids) for item in prepared) == checked.max_prompt_tokens
    assert max(sum(medium.grid.rows for medium in item.media) for item in prepared) == checked.max_media_rows
    assert json.dumps(checked.num_rows) == "11"
