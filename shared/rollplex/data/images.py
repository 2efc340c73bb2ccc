"""Images of a dataset: what they declare, and their pixels. One rule for each kind of odd image.

    kind of image             rule
    declared pixels           width x height above the limit is refused before anything is decoded
    format                    by content, never by extension: PNG, JPEG, WebP, GIF, BMP, TIFF, PPM; no others
    animated                  the first frame
    EXIF orientation          applied, if it stands before the pixels (width and height here are those after it)
    transparency              laid on white, as transformers does
    grey of 16 bits           divided by 256 (Pillow's own conversion would clip at 255)
    integers or floats, 32 b  refused: their range is not known
    CMYK, palettes, other     Pillow's conversion to RGB
    truncated                 refused; noticed at the check where the format marks its end, else by decoding it there
    wider than 200:1          refused, by the model's own rule (`rollplex.data.patches`)

Any warning of Pillow's counts as an error, and Pillow's own limit (PIL.Image.MAX_IMAGE_PIXELS) is left as it is.
Decoding runs under a limit of address space. Does not know rows, patches or tokens.
"""

from __future__ import annotations

import hashlib
import io
import os
import resource
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from msgspec import Struct
from PIL import ExifTags, Image, UnidentifiedImageError

from rollplex.data.files import open_beneath
from rollplex.data.media import Embedded, Place
from rollplex.errors import DataError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_FILE_BYTES = 2**30
END_BYTES = 4096
_CHUNK_BYTES = 2**20
SLACK_BYTES = 2**29
"""Address space that decoding may take beside the pixels: Pillow's buffers, the other threads of this process."""
_BROKEN = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    LookupError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
    Warning,
    Image.DecompressionBombError,
)
"""What Pillow's readers raise on files that are not what they seem."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation to what undoes it (EXIF 2.3, tag 0x0112)."""


class Header(Struct, frozen=True, kw_only=True):
    """What an image declares."""

    width: int
    height: int
    """Both after the EXIF orientation."""
    identity: bytes
    """16 bytes of a digest of the file's bytes; not of its name or any date."""


class ImageFolder:
    """The images under one folder, and those that rows hold themselves.

    Args:
        root: no file outside it is opened.
        max_pixels: largest width x height that an image may declare.

    Raises:
        DataError: `root` is not a folder.
    """

    def __init__(self, root: Path, max_pixels: int) -> None:
        try:
            self._root = root.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise DataError("The image folder cannot be opened", got=str(error), where=str(root)) from error
        if not self._root.is_dir():
            raise DataError("The image folder is not a folder", where=str(root))
        self._max_pixels = max_pixels

    def header(self, place: Place, *, decode: bool = False) -> Header:
        """Read what an image declares; decode it only if its format does not show whether the file is whole.

        Args:
            place: path relative to the folder, or the file itself.
            decode: decode it in any case.

        Raises:
            DataError: the image cannot be used; the error says why, but not in which row.
        """
        name = name_of(place)
        with self.open(place) as file, _pillow(file, name) as image:
            turn = self._declared(image, name)
            width, height = image.size if turn < 5 else image.size[::-1]
            ends = Ends.of(file)
            if decode or not ends.whole(image.format):
                _decode(image)
        return Header(width=width, height=height, identity=ends.identity())

    def load(self, place: Place) -> Image.Image:
        """The pixels of an image: mode RGB, upright.

        Raises:
            DataError: as for `header`, or the pixels cannot be decoded.
        """
        name = name_of(place)
        with self.open(place) as file, _pillow(file, name) as image:
            turn = self._declared(image, name)
            _decode(image)
            upright = _rgb(image)
            return upright.transpose(_TURNS[turn]) if turn in _TURNS else upright

    def open(self, place: Place) -> IO[bytes]:
        """The encoded file itself, for reading. Raises DataError as `header`."""
        if isinstance(place, Embedded):
            file: IO[bytes] = io.BytesIO(place.data)
        else:
            file = os.fdopen(open_beneath(self._root, place), "rb")
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if 0 < size <= MAX_FILE_BYTES:
            return file
        file.close()
        raise DataError(
            "This file is empty" if size == 0 else "This file is too large",
            got=f"{name_of(place)!r}, {size} bytes",
            needed=f"1 to {MAX_FILE_BYTES} bytes",
        )

    def _declared(self, image: Image.Image, name: str) -> int:
        """Check what the header says; return the EXIF orientation. Nothing is decoded."""
        width, height = image.size
        if not 0 < width * height <= self._max_pixels:
            raise DataError(
                "This image declares too many pixels" if width * height else "This image has no pixels",
                got=f"{name!r}, {width} x {height} = {width * height}",
                needed=f"at most {self._max_pixels}",
                do="Scale it down, or raise data.max_image_pixels.",
            )
        if image.mode in {"I", "F"}:
            raise DataError(
                "This image has numbers of 32 bits, whose range is not known",
                got=f"{name!r}, mode {image.mode}",
                needed="8 or 16 bits a channel",
            )
        # Not PngImageFile.getexif: it decodes the image to find a chunk behind the pixels.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
        return orientation if orientation in _TURNS else 1


def name_of(place: Place) -> str:
    """An image as errors name it."""
    return place.name if isinstance(place, Embedded) else place


@contextmanager
def _pillow(file: IO[bytes], name: str) -> Iterator[Image.Image]:
    """Pillow's view of a file; whatever its readers raise becomes a DataError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Image.open(file, formats=FORMATS) as image:
                yield image
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError("This is not an image", got=repr(name), needed=f"one of {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:  # above Pillow's own limit
        raise DataError(
            "This image declares too many pixels", got=f"{name!r}: {str(error).rstrip('.')}", do="Scale it down."
        ) from error
    except _BROKEN as error:
        reason = str(error) or type(error).__name__
        raise DataError("This image cannot be read", got=f"{name!r}: {reason}", needed="a whole image file") from error


def _decode(image: Image.Image) -> None:
    """Decode within an address space that the declared size explains: at most 16 bytes a pixel, and slack."""
    with address_space_limit(16 * image.width * image.height + SLACK_BYTES):
        image.load()


@contextmanager
def address_space_limit(more_bytes: int) -> Iterator[None]:
    """Let this process grow by at most so many bytes while the block runs (RLIMIT_AS); beyond it, MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    for known in (soft, hard):
        limit = limit if known == resource.RLIM_INFINITY else min(limit, known)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _rgb(image: Image.Image) -> Image.Image:
    """Mode RGB by the table above."""
    if image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.uint16) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


class Ends(Struct, frozen=True, kw_only=True):
    """The size of a file, its first and last bytes, and a digest of all of it."""

    size: int
    first: bytes
    last: bytes
    digest: bytes

    @classmethod
    def of(cls, file: IO[bytes]) -> Ends:
        size = file.seek(0, os.SEEK_END)
        pieces: list[bytes] = []
        for start in (0, max(0, size - END_BYTES)):
            file.seek(start)
            pieces.append(file.read(END_BYTES))
        file.seek(0)
        digest = hashlib.blake2b(digest_size=16)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        file.seek(0)
        return cls(size=size, first=pieces[0], last=pieces[1], digest=digest.digest())

    def identity(self) -> bytes:
        """16 bytes of a digest of the whole file: another picture has another one, whatever its size and ends."""
        return self.digest

    def whole(self, kind: str | None) -> bool:
        """Whether the file ends as its format says it must. False for formats that do not mark their end."""
        match kind:
            case "PNG":
                return self.last.endswith(b"\0\0\0\0IEND\xaeB`\x82")
            case "JPEG" | "MPO":
                return self.last.rstrip(b"\0").endswith(b"\xff\xd9")
            case "GIF":
                return self.last.endswith(b"\x3b")
            case "WEBP":
                return int.from_bytes(self.first[4:8], "little") + 8 <= self.size
            case _:
                return False
