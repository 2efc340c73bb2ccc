"""Videos: as lists of frames, or as files, of which some frames are taken (PyAV, extra `video`).

    kinds of file      MP4, MOV, Matroska, WebM and AVI, told by their first bytes; no playlists, nothing that names
                       another file
    which frames       `fps` a second over the whole length, as many as a whole number of temporal patches, at least 4
                       and at most `max_frames`, evenly: as transformers' Qwen2VLVideoProcessor takes them
    timing             frames taken per second, for the positions of their tokens
    rotation           that of the display matrix is applied
    bounds             declared pixels of a frame, frames of a file, bytes of a file; a frame is scaled as soon as it is
                       decoded, so that only scaled ones are held

At the check a file's packets are counted and its first frame is decoded. Does not know rows or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NoReturn

import msgspec
import numpy as np
from msgspec import Struct
from PIL import Image

from rollplex.data.images import SLACK_BYTES, Ends, Header, ImageFolder, address_space_limit, name_of
from rollplex.data.media import Clip, Footage, Place
from rollplex.data.patches import Patches, frame_patches, video_grid
from rollplex.data.processor import PixelRules
from rollplex.data.stores.base import missing_extra
from rollplex.errors import DataError
from rollplex.protocol.inputs import DataSource

MIN_FRAMES = 4
MAX_FILE_FRAMES = 108_000
"""An hour at 30 a second. All frames up to the last one taken are decoded."""
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
"""Degrees counterclockwise."""


class Sampling(Struct, frozen=True, kw_only=True):
    """Which frames of a file are taken."""

    fps: float
    """Frames a second."""
    max_frames: int
    temporal_patch: int
    """Frames taken are a multiple of this, if there are so many."""


class VideoHeader(Struct, frozen=True, kw_only=True):
    """What a video declares."""

    frames: int
    """So many reach the model."""
    width: int
    height: int
    """Both as displayed."""
    fps: float
    """Of the frames that reach the model."""
    identities: tuple[bytes, ...]
    """As `Header.identity`: of the file, or of each frame."""


def videos_of_source(source: DataSource, images: ImageFolder, temporal_patch: int = 2) -> Videos:
    """The videos of a dataset, read as its description says."""
    sampling = Sampling(fps=source.video_fps, max_frames=source.max_frames, temporal_patch=temporal_patch)
    return Videos(images, sampling, source.max_image_pixels)


class Videos:
    """The videos of a dataset.

    Args:
        images: opens files, and reads frames that are files.
        sampling: of files that are videos.
        max_pixels: largest width x height that a frame of a file may declare.
    """

    def __init__(self, images: ImageFolder, sampling: Sampling, max_pixels: int) -> None:
        self._images = images
        self._sampling = sampling
        self._max_pixels = max_pixels

    def header(self, video: Clip | Footage, frame: Callable[[Place], Header], *, decode: bool = False) -> VideoHeader:
        """What a video declares, checked.

        Args:
            video: of a row.
            frame: reads the header of a frame that is a file.
            decode: also decode every frame that will be taken.

        Raises:
            DataError: the video cannot be used.
            ConfigError: PyAV is not installed.
        """
        if isinstance(video, Clip):
            headers = [frame(place) for place in video.frames]
            sizes = [(header.width, header.height) for header in headers]
            _check_same_size([name_of(place) for place in video.frames], sizes)
            identities = tuple(header.identity for header in headers)
            return VideoHeader(
                frames=len(sizes), width=sizes[0][0], height=sizes[0][1], fps=video.fps, identities=identities
            )
        with self._footage(video) as footage:
            if decode:
                for _ in footage.pictures():
                    pass
            return footage.header

    def patches(self, video: Clip | Footage, rules: PixelRules) -> tuple[Patches, float]:
        """The patches of a video, and how many of its frames make a second. Raises as `header`."""
        if isinstance(video, Clip):
            pictures = [self._images.load(place) for place in video.frames]
            _check_same_size([name_of(place) for place in video.frames], [picture.size for picture in pictures])
            grid = video_grid(len(pictures), pictures[0].height, pictures[0].width, rules)
            return frame_patches(pictures, grid, rules), video.fps
        with self._footage(video) as footage:
            header = footage.header
            grid = video_grid(header.frames, header.height, header.width, rules)
            return frame_patches(footage.pictures(), grid, rules), header.fps

    def first(self, video: Clip | Footage) -> Image.Image:
        """The first frame: mode RGB, upright. Raises as `header`."""
        if isinstance(video, Clip):
            return self._images.load(video.frames[0])
        with self._footage(video) as footage:
            return next(footage.pictures())

    @contextmanager
    def _footage(self, video: Footage) -> Iterator[_Footage]:
        av = _import_av()
        name = name_of(video.place)
        with self._images.open(video.place) as file:
            kind = _container(file)
            if kind is None:
                raise DataError(
                    "This is not a video",
                    got=repr(name),
                    needed="MP4, MOV, Matroska, WebM or AVI, or a list of the frames' paths",
                )
            try:
                # The kind is ours, so no playlist is taken for a video; other files would be opened by io_open.
                with av.open(file, format=kind, io_open=_open_nothing) as container:
                    sampling = self._sampling if video.fps is None else _with_fps(self._sampling, video.fps)
                    yield _Footage(container, name, sampling, self._max_pixels, Ends.of(file).identity())
            except (av.FFmpegError, ValueError, IndexError, MemoryError, ArithmeticError) as error:
                reason = str(error) or type(error).__name__
                raise DataError(
                    "This video cannot be read", got=f"{name!r}: {reason}", needed="a whole video file"
                ) from error


class _Footage:
    """An open video file."""

    def __init__(self, container: Any, name: str, sampling: Sampling, max_pixels: int, identity: bytes) -> None:
        if not container.streams.video:
            raise DataError("This file has no video in it", got=repr(name))
        self._container = container
        self._name = name
        self._stream = container.streams.video[0]
        self._stream.codec_context.thread_count = 1
        width, height = self._stream.codec_context.width, self._stream.codec_context.height
        if not 0 < width * height <= max_pixels:
            raise DataError(
                "This video declares too many pixels",
                got=f"{name!r}, {width} x {height} = {width * height}",
                needed=f"1 to {max_pixels} in a frame",
                do="Scale it down, or raise data.max_image_pixels.",
            )
        self._limit_bytes = 64 * width * height + 2 * SLACK_BYTES
        rate = self._stream.average_rate or self._stream.guessed_rate
        total = self._count()
        if not rate:
            raise DataError("This video does not say how fast it is", got=repr(name), needed="frames per second")
        self._taken = frames_taken(total, float(rate), sampling)
        first = _upright(next(self._decoded()))
        self._size = first.size
        self.header = VideoHeader(
            frames=len(self._taken),
            width=first.width,
            height=first.height,
            fps=len(self._taken) / total * float(rate),
            identities=(identity,),
        )

    def pictures(self) -> Iterator[Image.Image]:
        """The frames that are taken: mode RGB, upright."""
        wanted = iter(self._taken)
        index = next(wanted)
        for number, frame in enumerate(self._decoded()):
            if number != index:
                continue
            picture = _upright(frame)
            if picture.size != self._size:
                raise DataError("The frames of a video differ in size", got=f"{self._name!r}, frame {number}")
            yield picture
            index = next(wanted, -1)
            if index < 0:
                return
        raise DataError("This video is not whole", got=f"{self._name!r}, no frame {index}", needed="a whole video file")

    def _decoded(self) -> Iterator[Any]:
        """All frames in the order of display, from the first."""
        self._container.seek(0)
        frames = self._container.decode(self._stream)
        while True:
            with address_space_limit(self._limit_bytes):
                frame = next(frames, None)
            if frame is None:
                return
            yield frame

    def _count(self) -> int:
        """Frames of the stream, by its packets; nothing is decoded. Those that are not to be shown do not count."""
        packets, shown = 0, 0
        for packet in self._container.demux(self._stream):
            if packet.size:
                packets += 1
                shown += not packet.is_discard
            if packets > MAX_FILE_FRAMES:
                needed = f"at most {MAX_FILE_FRAMES} frames"
                raise DataError("This video is too long", got=repr(self._name), needed=needed, do="Cut it.")
        if not shown or packets < self._stream.frames:
            raise DataError(
                "This video is not whole",
                got=f"{self._name!r}, {packets} frames",
                needed=f"{self._stream.frames}, as it says" if self._stream.frames else "at least one",
            )
        return shown


def frames_taken(total: int, rate: float, sampling: Sampling) -> list[int]:
    """Which frames of a file are taken; ascending, from 0.

    Args:
        total: frames of the file.
        rate: of them a second.
        sampling: how many are wanted.
    """
    patch = sampling.temporal_patch
    most = min(sampling.max_frames, total) // patch * patch
    wanted = min(max(total / rate * sampling.fps, MIN_FRAMES), most, total)
    count = math.floor(wanted / patch) * patch
    if not count:  # fewer than a temporal patch holds: the last one fills up
        return list(range(total))[: sampling.max_frames]
    step = total / count
    return [int(np.float32(index * step)) for index in range(count)]


def _upright(frame: Any) -> Image.Image:
    """A frame as it is to be displayed, mode RGB."""
    picture: Image.Image = frame.to_image()
    turn = _TURNS.get(frame.rotation % 360)
    return picture if turn is None else picture.transpose(turn)


def _with_fps(sampling: Sampling, fps: float) -> Sampling:
    return msgspec.structs.replace(sampling, fps=fps)


def _container(file: IO[bytes]) -> str | None:
    """The kind of container, by its first bytes; leaves the file at its start."""
    first = file.read(16)
    file.seek(0)
    if first[4:8] in {b"ftyp", b"moov", b"mdat", b"wide", b"free"}:
        return "mp4"
    if first.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    return "avi" if first.startswith(b"RIFF") and first[8:12] == b"AVI " else None


def _open_nothing(_url: str, _flags: int, _options: object) -> NoReturn:
    raise OSError("a video may not name other files")


def _import_av() -> Any:
    try:
        import av  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise missing_extra("A video file", "av", "video") from error
    return av


def _check_same_size(names: Sequence[str], sizes: Sequence[tuple[int, int]]) -> None:
    """Raises DataError if the frames of a video differ in width or height."""
    for name, size in zip(names, sizes, strict=True):
        if size != sizes[0]:
            raise DataError(
                "The frames of a video differ in size",
                got=f"{name!r}, {size[0]} x {size[1]}",
                needed=f"{sizes[0][0]} x {sizes[0][1]}, as its first frame",
            )
