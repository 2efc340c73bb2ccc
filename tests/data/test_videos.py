"""Video files: which frames are taken, at what times, and what is refused."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from rollplex.data.images import ImageFolder
from rollplex.data.media import Clip, Embedded, Footage
from rollplex.data.patches import video_grid
from rollplex.data.positions import Medium, mrope_positions
from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.source import Source
from rollplex.data.videos import Sampling, Videos, frames_taken
from rollplex.errors import ConfigError, DataError
from rollplex.layout.shape import ModelShape
from rollplex.protocol.inputs import DataSource

Dataset = Callable[..., DataSource]
SAMPLING = Sampling(fps=2.0, max_frames=64, temporal_patch=2)
CODECS = {"mp4": "libx264", "mov": "libx264", "mkv": "libx264", "webm": "libvpx-vp9", "avi": "mpeg4"}


def shade(number: int) -> tuple[int, int, int]:
    """The colour of a frame, by which it is known again."""
    return (8 * number % 256, 255 - 8 * number % 256, 100)


def video_frame(image: Image.Image) -> av.VideoFrame:
    kind: Any = av.VideoFrame
    frame: av.VideoFrame = kind.from_image(image)
    return frame


def write_video(path: Path, frames: int = 30, fps: int = 10, size: tuple[int, int] = (112, 56)) -> Path:
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(CODECS[path.suffix[1:]], rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        if path.suffix in {".mp4", ".mkv", ".mov"}:
            stream.options = {"crf": "5", "bf": "2"}  # with frames that are stored after later ones
        else:
            stream.bit_rate = 10**7
        for number in range(frames):
            for packet in stream.encode(video_frame(Image.new("RGB", size, shade(number)))):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


@pytest.fixture
def videos(images: Path) -> Callable[..., Videos]:
    def make(max_pixels: int = 2**24, **sampling: Any) -> Videos:
        values = {"fps": 2.0, "max_frames": 64, "temporal_patch": 2, **sampling}
        return Videos(ImageFolder(images, max_pixels), Sampling(**values), max_pixels)

    return make


MakeVideos = Callable[..., Videos]


def no_frames(_: object) -> Any:
    pytest.fail("a file has no frames that are files")


def numbers(patches: Any) -> list[int]:
    """Which frames these are, by their red."""
    red = patches.raw[:, 0].reshape(patches.grid.frames, -1, patches.raw.shape[2], 14 * 14).mean(axis=(1, 3))
    return [round(float(value) / 8) for value in red.reshape(-1)]


@pytest.mark.parametrize("kind", CODECS)
def test_frames_are_taken_evenly_from_every_kind_of_file(
    kind: str, images: Path, videos: MakeVideos, rules: Rules
) -> None:
    write_video(images / f"v.{kind}")
    header = videos().header(Footage(place=f"v.{kind}"), no_frames, decode=True)
    assert (header.frames, header.width, header.height, header.fps) == (6, 112, 56, 2.0)
    patches, fps = videos().patches(Footage(place=f"v.{kind}"), rules.video)
    assert fps == 2.0
    assert patches.grid == video_grid(6, 56, 112, rules.video)
    assert numbers(patches) == [0, 5, 10, 15, 20, 25]


def test_the_first_frame_of_a_file_and_of_a_list_is_the_first_one(images: Path, videos: MakeVideos) -> None:
    write_video(images / "v.mp4")
    shown = videos().first(Footage(place="v.mp4"))
    assert (shown.mode, shown.size) == ("RGB", (112, 56))
    assert np.abs(np.asarray(shown).astype(int).mean((0, 1)) - shade(0)).max() < 6
    with Image.open(images / "f2.png") as frame:
        first = videos().first(Clip(frames=("f2.png", "f1.png"), fps=2.0))
        assert np.array_equal(np.asarray(first), np.asarray(frame))


def test_a_video_in_the_row_is_the_same_as_the_file(images: Path, videos: MakeVideos, rules: Rules) -> None:
    write_video(images / "v.mp4")
    data = (images / "v.mp4").read_bytes()
    file, _ = videos().patches(Footage(place="v.mp4"), rules.video)
    row, _ = videos().patches(Footage(place=Embedded(data, "v")), rules.video)
    assert np.array_equal(file.raw, row.raw)
    places = (Footage(place="v.mp4"), Footage(place=Embedded(data, "v")))
    assert len({videos().header(place, no_frames).identities for place in places}) == 1


@pytest.mark.parametrize(
    ("total", "rate", "sampling", "taken"),
    [
        (30, 10.0, {}, [0, 5, 10, 15, 20, 25]),
        (30, 10.0, {"fps": 1.0}, [0, 7, 15, 22]),
        (30, 10.0, {"fps": 0.1}, [0, 7, 15, 22]),
        (30, 10.0, {"fps": 100.0}, list(range(30))),
        (31, 10.0, {"fps": 10.0}, [int(i * 31 / 30) for i in range(30)]),
        (300, 10.0, {"max_frames": 4}, [0, 75, 150, 225]),
        (300, 10.0, {"max_frames": 5}, [0, 75, 150, 225]),
        (3, 10.0, {}, [0, 1]),
        (1, 10.0, {}, [0]),
    ],
)
def test_which_frames_are_taken(total: int, rate: float, sampling: dict[str, Any], taken: list[int]) -> None:
    given = {"fps": 2.0, "max_frames": 64, "temporal_patch": 2, **sampling}
    assert frames_taken(total, rate, Sampling(**given)) == taken


def test_the_frames_taken_are_those_of_transformers() -> None:
    import torch
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl  # noqa: F401 - its package can be imported

    def theirs(total: int, rate: float, sampling: Sampling) -> list[int]:
        """`Qwen2VLVideoProcessor.sample_frames` of transformers 5.24, which needs torchvision to be imported."""
        most = min(sampling.max_frames, total) // 2 * 2
        count = int(min(max(total / rate * sampling.fps, 4), most, total) // 2 * 2)
        return [int(index) for index in torch.arange(0, total, total / count).int()]

    for total in (2, 3, 4, 5, 17, 30, 97, 333, 1000, 30_011):
        for rate in (5.0, 23.976, 29.97, 60.0):
            for fps, most in ((0.5, 64), (2.0, 64), (2.0, 768), (7.3, 10)):
                sampling = Sampling(fps=fps, max_frames=most, temporal_patch=2)
                assert frames_taken(total, rate, sampling) == theirs(total, rate, sampling), (total, rate, fps, most)


def test_a_rows_own_rate_goes_before_the_configurations(images: Path, videos: MakeVideos, rules: Rules) -> None:
    write_video(images / "v.mp4")
    patches, fps = videos().patches(Footage(place="v.mp4", fps=5.0), rules.video)
    assert (fps, numbers(patches)) == (14 / 3, [int(i * 30 / 14) for i in range(14)])


def test_times_of_the_frames_reach_the_positions(
    images: Path, dataset: Dataset, maker: PromptMaker, rules: Rules, shape: ModelShape
) -> None:
    write_video(images / "v.mp4", frames=40, fps=10)
    row = {"prompt": "<video>", "videos": ["v.mp4"]}
    source = Source(dataset([row], max_frames=4), maker, rules)
    checked = source.check()
    prepared = source.prepare(0)
    grid = video_grid(4, 56, 112, rules.video)
    assert checked.max_media_tokens == grid.tokens(2)
    start = int(np.flatnonzero(prepared.prompt.ids == shape.video_id)[0])
    medium = Medium(start=start, grid=grid, seconds_per_grid=2.0)  # 4 frames in 4 seconds, two of them a patch
    expected, following = mrope_positions(
        len(prepared.prompt.ids), [medium], merge=2, tokens_per_second=shape.vision.tokens_per_second
    )
    assert np.array_equal(prepared.prompt.positions, expected)
    assert prepared.prompt.next_position == following


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"videos": ["v.mp4", "w.mp4"]}, [Footage(place="v.mp4"), Footage(place="w.mp4")]),
        ({"video": "v.mp4"}, [Footage(place="v.mp4")]),
        ({"videos": "v.mp4", "video_fps": 3}, [Footage(place="v.mp4", fps=3.0)]),
        ({"videos": [{"video": "v.mp4", "fps": 4}]}, [Footage(place="v.mp4", fps=4.0)]),
        ({"videos": [{"type": "video", "video": ["a.png", "b.png"]}]}, [Clip(frames=("a.png", "b.png"), fps=2.0)]),
        ({"videos": [{"path": "v.mp4", "bytes": None}]}, [Footage(place="v.mp4")]),
        ({"video": ["a.png", "b.png"], "video_fps": 1}, [Clip(frames=("a.png", "b.png"), fps=1.0)]),
        (
            {"videos": [["a.png"], "v.mp4"], "video_fps": [1, None]},
            [Clip(frames=("a.png",), fps=1), Footage(place="v.mp4")],
        ),
        ({"videos": ["data:video/mp4;base64,AAAA"]}, [Footage(place=Embedded(b"\0\0\0", '"videos"[0]'))]),
        ({"videos": []}, []),
        ({"video": []}, []),
        ({"videos": None, "video": None}, []),
    ],
)
def test_videos_of_a_row_are_files_or_lists_of_frames(fields: dict[str, Any], expected: list[Any]) -> None:
    from rollplex.data.rows import parse

    assert list(parse(json.dumps({"prompt": "q", **fields}).encode(), 0).videos) == expected


def turned(path: Path, quarters: int) -> None:
    """Put a display matrix into an MP4: so many quarter turns clockwise."""
    cosine, sine = ((1, 0), (0, 1), (-1, 0), (0, -1))[quarters]
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 4 + 40
    numbers = (cosine << 16, sine << 16, 0, -sine << 16, cosine << 16, 0, 0, 0, 1 << 30)
    content[at : at + 36] = b"".join((number & 0xFFFFFFFF).to_bytes(4, "big") for number in numbers)
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("quarters", range(4))
def test_a_video_is_turned_as_its_display_matrix_says(
    quarters: int, images: Path, videos: MakeVideos, rules: Rules
) -> None:
    half = Image.new("RGB", (112, 56), (250, 0, 0))
    half.paste((0, 0, 250), (56, 0, 112, 56))  # left red, right blue
    with av.open(str(images / "v.mp4"), "w") as container:
        stream: Any = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.options = 112, 56, "yuv420p", {"crf": "5"}
        for packet in [*stream.encode(video_frame(half)), *stream.encode()]:
            container.mux(packet)
    turned(images / "v.mp4", quarters)
    header = videos().header(Footage(place="v.mp4"), no_frames)
    assert (header.width, header.height) == ((112, 56), (56, 112))[quarters % 2]
    with videos()._footage(Footage(place="v.mp4")) as footage:
        (picture,) = footage.pictures()
    middle = {0: (20, 28), 1: (28, 20), 2: (92, 28), 3: (28, 92)}[quarters]  # where red must be
    red, _, blue = picture.getpixel(middle)  # type: ignore[misc] # of an RGB image
    assert red > 200
    assert blue < 60


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "This file is empty; got 'bad.mp4', 0 bytes"),
        (
            b"no video at all, but some bytes",
            "This is not a video; got 'bad.mp4'; needed MP4, MOV, Matroska, WebM or AVI, or",
        ),
        (PLAYLIST, "This is not a video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "This is not a video"),
        (b"\0\0\0\x18ftypisom" + b"\0" * 40, "This video cannot be read; got 'bad.mp4': "),
        (b"\x1a\x45\xdf\xa3" + b"\0" * 60, "This video cannot be read"),
    ],
)
def test_what_is_no_video_is_refused(content: bytes, says: str, images: Path, videos: MakeVideos) -> None:
    (images / "bad.mp4").write_bytes(content)
    with pytest.raises(DataError) as caught:
        videos().header(Footage(place="bad.mp4"), no_frames)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi"])
def test_a_truncated_video_is_noticed_by_its_end_or_by_decoding(
    kind: str, images: Path, videos: MakeVideos, rules: Rules
) -> None:
    write_video(images / f"v.{kind}", frames=60)
    path = images / f"v.{kind}"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    if kind == "mkv":  # says nowhere how long it is: what is there counts, at the check and later
        header = videos().header(Footage(place=path.name), no_frames, decode=True)
        assert header.frames < 12
        assert videos().patches(Footage(place=path.name), rules.video)[0].grid.frames == header.frames // 2
        return
    with pytest.raises(DataError, match="This video is not whole|This video cannot be read"):
        videos().header(Footage(place=path.name), no_frames)


def test_bounds_are_kept_before_anything_is_decoded(
    images: Path, videos: MakeVideos, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(images / "v.mp4")
    with pytest.raises(DataError, match="declares too many pixels; got 'v.mp4', 112 x 56 = 6272; needed 1 to 6271 in"):
        videos(max_pixels=6271).header(Footage(place="v.mp4"), no_frames)
    monkeypatch.setattr("rollplex.data.videos.MAX_FILE_FRAMES", 29)
    with pytest.raises(DataError, match="This video is too long; got 'v.mp4'; needed at most 29 frames. Cut it."):
        videos().header(Footage(place="v.mp4"), no_frames)


@pytest.mark.parametrize("place", ["../v.mp4", "/etc/passwd", "http://localhost/v.mp4", "file:v.mp4"])
def test_a_video_outside_the_folder_is_not_opened(place: str, videos: MakeVideos) -> None:
    with pytest.raises(DataError, match="out of the image folder|No such file|an absolute path|a URL"):
        videos().header(Footage(place=place), no_frames)


def test_a_file_without_pictures_is_refused(images: Path, videos: MakeVideos) -> None:
    with av.open(str(images / "sound.mp4"), "w") as container:
        stream: Any = container.add_stream("aac", rate=44_100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44_100
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    with pytest.raises(DataError, match="This file has no video in it; got 'sound.mp4'"):
        videos().header(Footage(place="sound.mp4"), no_frames)


def test_a_missing_package_is_named_with_its_extra(
    images: Path, videos: MakeVideos, monkeypatch: pytest.MonkeyPatch
) -> None:
    (images / "v.mp4").write_bytes(b"x")
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "av":
            raise ModuleNotFoundError(name=name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"A video file needs a package .* pip install 'rollplex\[video\]'"):
        videos().header(Footage(place="v.mp4"), no_frames)


def test_a_dataset_of_videos_is_checked_and_prepared(
    images: Path, dataset: Dataset, maker: PromptMaker, rules: Rules
) -> None:
    write_video(images / "v.mp4")
    write_video(images / "w.webm", frames=12, fps=4, size=(56, 84))
    rows = [
        {
            "messages": [{"role": "user", "content": "<video> and <image><video>?"}],
            "videos": ["v.mp4", "w.webm"],
            "image": "a.png",
        },
        {"messages": [{"role": "user", "content": "again <video>"}], "videos": ["v.mp4"]},
    ]
    source = Source(dataset(rows), maker, rules)
    checked = source.check()
    first, second = source.prepare(0), source.prepare(1)
    assert [medium.grid.frames for medium in first.media] == [3, 1, 3]
    assert np.array_equal(first.media[0].raw, second.media[0].raw)
    assert checked.max_prompt_tokens == len(first.prompt.ids)
    (images / "v.mp4").write_bytes((images / "w.webm").read_bytes())
    with pytest.raises(DataError, match=r"\(row 1\): This row is not what it was when the run began"):
        source.prepare(1)


def test_a_video_of_several_rows_is_opened_once_at_the_check(
    images: Path, dataset: Dataset, maker: PromptMaker, rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(images / "v.mp4")
    opened: list[object] = []
    header = Videos.header

    def count(self: Videos, video: Any, *arguments: Any, **keywords: Any) -> Any:
        opened.append(video)
        return header(self, video, *arguments, **keywords)

    monkeypatch.setattr(Videos, "header", count)
    rows = [{"prompt": f"{number}<video>", "videos": ["v.mp4"]} for number in range(5)]
    assert Source(dataset(rows), maker, rules).check().num_rows == 5
    assert len(opened) == 1


MEMORY = """
import resource, sys
from pathlib import Path
from rollplex.data.images import ImageFolder
from rollplex.data.media import Footage
from rollplex.data.processor import PixelRules
from rollplex.data.videos import Sampling, Videos

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

rules = PixelRules(patch=14, temporal_patch=2, merge=2, min_pixels=3136, max_pixels=28 * 28 * 16, mean=(0, 0, 0),
                   std=(1, 1, 1), rescale=1.0, resample=3)
videos = Videos(ImageFolder(Path(sys.argv[1]), 2**24), Sampling(fps=100, max_frames=400, temporal_patch=2), 2**24)
videos.patches(Footage(place="short.mp4"), rules)
before = peak()
print(videos.patches(Footage(place="long.mp4"), rules)[0].grid.frames, peak() - before)
"""


def test_only_scaled_frames_are_held(images: Path) -> None:
    write_video(images / "short.mp4", frames=4, size=(640, 480))
    write_video(images / "long.mp4", frames=300, size=(640, 480))
    command = [sys.executable, "-c", MEMORY, str(images)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    frames, mebibytes = map(int, done.stdout.split())
    assert frames == 150
    assert mebibytes < 60  # 300 decoded frames are 264 MiB, scaled they are 11
