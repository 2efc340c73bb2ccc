"""Paths that lead elsewhere, and images that are not what they seem."""

from __future__ import annotations

import os
import resource
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from PIL import Image, ImageFile

from rollplex.data.images import ImageFolder, address_space_limit
from rollplex.errors import DataError

Picture = Callable[[int, int, int], Image.Image]


@pytest.fixture
def folder(images: Path) -> ImageFolder:
    return ImageFolder(images, 2**24)


class Opened:
    """Every path that this process opens, by the interpreter's own audit events."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.listening = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.listening and event in {"open", "socket.connect", "socket.getaddrinfo"}:
            self.paths.append(str(arguments[0]))


OPENED = Opened()
sys.addaudithook(OPENED)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    OPENED.paths.clear()
    OPENED.listening = True
    yield OPENED.paths
    OPENED.listening = False


def test_a_good_image_is_read(folder: ImageFolder, picture: Picture) -> None:
    header = folder.header("a.png")
    assert (header.width, header.height) == (60, 84)
    assert np.array_equal(np.asarray(folder.load("a.png")), np.asarray(picture(60, 84, 1)))
    assert folder.header("b.jpg", decode=True).width == 112


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "an empty name"),
        ("../secret.png", "out of the image folder"),
        ("deep/../../secret.png", "out of the image folder"),
        ("/etc/passwd", "an absolute path"),
        ("leads_out.png", "out of the image folder"),
        ("folder_out/secret.png", "out of the image folder"),
        ("loop.png", "loop of symbolic links"),
        ("dangling.png", "No such file"),
        ("file:///etc/passwd", "a URL"),
        ("file:a.png", "a URL"),
        ("http://169.254.169.254/latest", "a URL"),
        ("data:image/png;base64,AAAA", "a URL"),
        ("a.png\0.jpg", "NUL"),
        ("x" * 300, "File name too long"),
        ("x/" * 5000, "bytes long"),
        ("fifo", "a FIFO"),
        ("to_zero", "out of the image folder"),
        ("socket", "a socket"),
        (".", "a folder"),
        ("absent.png", "No such file"),
        ("a.png/b", "Not a directory"),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused_and_never_opened(
    name: str, says: str, images: Path, picture: Picture, opened: list[str]
) -> None:
    OPENED.listening = False
    picture(8, 8, 0).save(images.parent / "secret.png")
    (images / "deep").mkdir()
    (images / "leads_out.png").symlink_to(images.parent / "secret.png")
    (images / "folder_out").symlink_to("..")
    (images / "loop.png").symlink_to("loop.png")
    (images / "dangling.png").symlink_to("nothing.png")
    (images / "to_zero").symlink_to("/dev/zero")
    os.mkfifo(images / "fifo")
    os.mknod(images / "socket", 0o600 | 0o140000)
    OPENED.listening = True
    for read in (ImageFolder(images, 2**24).header, ImageFolder(images, 2**24).load):
        with pytest.raises(DataError, match=says):
            read(name)
    assert opened == []


def test_a_device_in_the_folder_is_refused(images: Path) -> None:
    try:
        os.mknod(images / "zero", 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("needs the right to make device nodes")
    with pytest.raises(DataError, match="a character device"):
        ImageFolder(images, 2**24).header("zero")


def test_links_that_stay_inside_are_followed(images: Path) -> None:
    (images / "again.png").symlink_to("a.png")
    (images.parent / "folder").symlink_to(images)
    assert ImageFolder(images.parent / "folder", 2**24).header("again.png").width == 60
    (images / "deep").mkdir()
    assert ImageFolder(images, 2**24).header("deep/../a.png").width == 60


def test_an_image_folder_that_is_none_is_refused(images: Path) -> None:
    for path, says in ((images / "absent", "cannot be opened"), (images / "a.png", "not a folder")):
        with pytest.raises(DataError, match=says):
            ImageFolder(path, 1)


def png(width: int, height: int, bits: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """A PNG that declares what it likes; its pixels, if none are given, are zeros, compressed."""
    channels = {0: 1, 2: 3}[colour]
    if not data:
        packer = zlib.compressobj(9)
        row = b"\0" * (1 + width * channels * bits // 8)
        data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [12_000, 20_000, 2**31 - 1])
def test_a_decompression_bomb_is_refused_by_what_it_declares(side: int, images: Path, folder: ImageFolder) -> None:
    (images / "bomb.png").write_bytes(png(side, side, data=zlib.compress(b"\0" * 64)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (folder.header, folder.load):
        with pytest.raises(DataError, match=r"too many pixels|cannot be read"):
            read("bomb.png")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024  # KiB
    assert PIL.Image.MAX_IMAGE_PIXELS == 89_478_485


def test_a_whole_bomb_of_144_million_pixels_is_never_decoded(
    images: Path, monkeypatch: pytest.MonkeyPatch, folder: ImageFolder
) -> None:
    packer = zlib.compressobj(1)
    rows = b"\0" * (1000 * (1 + 12_000 * 3))
    data = b"".join(packer.compress(rows) for _ in range(12)) + packer.flush()
    (images / "bomb.png").write_bytes(png(12_000, 12_000, data=data))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(DataError, match=r"too many pixels|cannot be read"):
        folder.header("bomb.png")


@pytest.mark.filterwarnings("ignore")  # the rule must be the module's own
def test_pillows_warning_counts_as_an_error_even_if_the_own_limit_is_higher(images: Path) -> None:
    (images / "bomb.png").write_bytes(png(12_000, 12_000, data=zlib.compress(b"\0")))
    with pytest.raises(DataError, match="decompression bomb"):
        ImageFolder(images, 10**9).header("bomb.png")


def test_the_limit_is_on_declared_pixels_and_inclusive(images: Path) -> None:
    assert ImageFolder(images, 60 * 84).header("a.png").width == 60
    with pytest.raises(DataError, match=r"60 x 84 = 5040; needed at most 5039"):
        ImageFolder(images, 60 * 84 - 1).header("a.png")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"\0", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (png(0, 5), "cannot be read|not an image|no pixels"),
        (png(8, 8)[:20], "cannot be read|not an image"),
        (b"P6 8 8 255\n" + b"\0" * 50, "cannot be read"),
    ],
)
def test_what_is_no_image_is_refused(content: bytes, says: str, images: Path, folder: ImageFolder) -> None:
    (images / "odd.png").write_bytes(content)
    for read in (folder.header, folder.load):
        with pytest.raises(DataError, match=says):
            read("odd.png")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_a_truncated_image_is_noticed_at_the_check_and_a_whole_one_passes(
    kind: str, images: Path, folder: ImageFolder, picture: Picture
) -> None:
    picture(90, 70, 4).save(images / "cut", format=kind)
    assert folder.header("cut").width == 90
    content = (images / "cut").read_bytes()
    for kept in (len(content) - 100, len(content) * 2 // 3):
        (images / "cut").write_bytes(content[:kept])
        for read in (folder.header, folder.load):
            with pytest.raises(DataError, match="cannot be read|not an image"):
                read("cut")


def test_damage_inside_an_image_is_found_by_decoding(images: Path, folder: ImageFolder) -> None:
    content = bytearray((images / "a.png").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (images / "a.png").write_bytes(bytes(content))
    folder.header("a.png")
    with pytest.raises(DataError, match="cannot be read"):
        folder.header("a.png", decode=True)
    with pytest.raises(DataError, match="cannot be read"):
        folder.load("a.png")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_with_orientation_is_turned_as_pillow_turns_it(
    orientation: int, kind: str, images: Path, folder: ImageFolder, picture: Picture
) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(40, 90, 3).save(images / "turned", format=kind, exif=exif)
    with Image.open(images / "turned") as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    header = folder.header("turned")
    assert np.array_equal(np.asarray(folder.load("turned")), expected)
    assert (header.height, header.width) == expected.shape[:2]


def test_an_orientation_that_is_none_is_ignored(images: Path, folder: ImageFolder, picture: Picture) -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    picture(40, 90, 3).save(images / "turned.png", exif=exif)
    assert folder.header("turned.png").width == folder.load("turned.png").width == 40


def test_the_content_decides_and_not_the_extension(images: Path, folder: ImageFolder, picture: Picture) -> None:
    picture(40, 50, 3).save(images / "really_a_png.jpg", format="PNG")
    assert np.array_equal(np.asarray(folder.load("really_a_png.jpg")), np.asarray(picture(40, 50, 3)))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animated_image_the_first_frame_counts(
    kind: str, images: Path, folder: ImageFolder, picture: Picture
) -> None:
    frames = [picture(40, 50, seed) for seed in range(3)]
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(images / "moving", format=kind, save_all=True, append_images=frames[1:], **options)
    with Image.open(images / "moving") as image:
        assert getattr(image, "n_frames", 1) == 3
        expected = np.asarray(image.convert("RGB"))
    assert folder.header("moving").width == 40
    assert np.array_equal(np.asarray(folder.load("moving")), expected)


def test_grey_of_16_bits_keeps_its_shades(images: Path, folder: ImageFolder) -> None:
    shades = np.array([[0, 255, 256, 32_768, 65_535]], np.uint16)
    Image.fromarray(shades).save(images / "grey.png")
    assert np.asarray(folder.load("grey.png"))[0].tolist() == [[shade // 256] * 3 for shade in shades[0].tolist()]


def test_colour_of_16_bits_is_read(images: Path, folder: ImageFolder) -> None:
    (images / "deep.png").write_bytes(png(4, 4, bits=16))
    assert folder.load("deep.png").mode == "RGB"


def test_numbers_of_32_bits_are_refused(images: Path, folder: ImageFolder) -> None:
    Image.fromarray(np.ones((4, 4), np.float32)).save(images / "float.tif")
    with pytest.raises(DataError, match="32 bits"):
        folder.load("float.tif")


def test_a_cmyk_jpeg_becomes_rgb(images: Path, folder: ImageFolder, picture: Picture) -> None:
    picture(40, 50, 3).convert("CMYK").save(images / "cmyk.jpg")
    assert folder.load("cmyk.jpg").mode == "RGB"


def test_the_identity_of_an_image_follows_its_bytes_and_not_its_dates(images: Path, folder: ImageFolder) -> None:
    before = folder.header("a.png").identity
    os.utime(images / "a.png", (1, 1))
    assert folder.header("a.png").identity == before
    (images / "f0.png").replace(images / "a.png")
    assert folder.header("a.png").identity != before


def test_an_image_that_differs_in_the_middle_alone_is_another_one(images: Path, folder: ImageFolder) -> None:
    pixels = np.zeros((120, 120, 3), np.uint8)
    Image.fromarray(pixels).save(images / "x.bmp")
    pixels[60, 60] = 255
    Image.fromarray(pixels).save(images / "y.bmp")
    assert (images / "x.bmp").stat().st_size == (images / "y.bmp").stat().st_size > 3 * 4096
    assert folder.header("x.bmp").identity != folder.header("y.bmp").identity


def test_decoding_runs_under_a_limit_of_address_space() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), address_space_limit(2**26):
        np.ones(2**27, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_no_descriptor_is_left_open(images: Path, folder: ImageFolder) -> None:
    (images / "bad.png").write_bytes(b"bad")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        folder.header("a.png")
        folder.load("a.png")
        for name in ("bad.png", "../x", "absent"):
            with pytest.raises(DataError):
                folder.load(name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
