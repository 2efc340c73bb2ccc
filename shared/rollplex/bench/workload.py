"""Writes a workload: a model, rows with real pictures, and a configuration, all of exactly known token counts.

    FOLDER/model        a preset with fresh weights
    FOLDER/images       photographs of sizes that give the vision tokens asked for
    FOLDER/rows.jsonl   pictures, or a video, and one question each; every prompt has the same number of tokens
    FOLDER/config.yaml  (`recipe`) GRPO with a reference model; every response has the length asked for, whatever is
                        sampled

Runs nothing. The same arguments give the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from msgspec import Struct

from rollplex.bench.layouts import Layout, mixed_layouts, mostly_vision, video_layout
from rollplex.bench.lengths import Lengths
from rollplex.bench.pictures import Album, picture_size, save
from rollplex.bench.placement import Placement
from rollplex.bench.recipe import Device, make_config
from rollplex.bench.summary import token_ceiling
from rollplex.config.loading import from_mapping
from rollplex.config.yaml_text import dumps
from rollplex.data.patches import Grid, image_grid, video_grid
from rollplex.data.processor import Rules, read_rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.rows import parse
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import ConfigError
from rollplex.layout.shape import ModelShape, read_shape
from rollplex.presets import SMALL, Preset, preset_named, write_model

STEPS_OF_ROWS: Final = 4
"""Different steps that the rows give before they come again in another order, unless another number is asked for."""
_WRITERS: Final = 8
"""Threads that write pictures, at most."""
_WORDS: Final = (
    "Look at the picture and describe what you see. Think about the question before you answer, "
    "and give the final answer at the end. "
)


class Wanted(Struct, frozen=True, kw_only=True):
    """What a workload is to be.

    Attributes:
        vision_tokens: of each prompt's media, after merging; 0: as many as `prompt_tokens` leaves room for.
        text_tokens: of each prompt's question, if `prompt_tokens` is 0; the chat template adds a few.
        prompt_tokens: of each prompt, exactly: the question fills up; 0: what the two above give.
        mixed: pictures of several sizes and ratios, and several in a row; needs `prompt_tokens`.
        video_frames: the media of each row are a video of so many frames; 0: pictures.
        lengths: of the responses.
        group_size: responses of a prompt.
        prompts: of one iteration.
        steps: different iterations that there are rows for.
        preset: name of the model's preset.
        device: what the configuration is for.
        placement: over how many devices, and how; None: one.
    """

    lengths: Lengths
    group_size: int
    prompts: int
    vision_tokens: int = 0
    text_tokens: int = 16
    prompt_tokens: int = 0
    mixed: bool = False
    video_frames: int = 0
    steps: int = STEPS_OF_ROWS
    preset: str = SMALL.name
    device: Device = "host"
    placement: Placement | None = None


class Workload(Struct, frozen=True, kw_only=True):
    """What `write_workload` wrote."""

    config: Path
    prompt_tokens: int
    """Of every prompt, as tokenised with its media: P."""
    vision_tokens: float
    """Of them the media's, mean over the rows."""
    group_size: int
    lengths: Lengths
    prompts: int
    """Of one iteration."""

    @property
    def token_ceiling(self) -> float:
        """What sharing could gain at most in scoring and training, by tokens through the language model."""
        lengths = self.lengths.of(self.group_size * self.prompts)
        return token_ceiling(self.prompt_tokens, sum(lengths) / len(lengths), self.group_size)


def write_workload(folder: Path, wanted: Wanted) -> Workload:
    """Write the folder; files of the same names are replaced.

    Raises:
        ConfigError: an unknown preset, or numbers that no prompt or run can have.
        DataError: scikit-learn is not installed.
        OSError: the folder cannot be written.
    """
    preset = preset_named(wanted.preset)
    values = make_config(
        lengths=wanted.lengths,
        group_size=wanted.group_size,
        prompts=wanted.prompts,
        device=wanted.device,
        placement=wanted.placement,
    )
    from_mapping(values)  # refused before anything is written
    _check(wanted, preset)
    model = write_model(preset, folder / "model")
    prompts = _Prompts(model)
    kinds = [prompts.kind(layout, wanted) for layout in _layouts(wanted, prompts)]
    if kinds[0].tokens + wanted.lengths.longest > preset.max_tokens:
        raise ConfigError(
            "A prompt and its response are longer than the model takes",
            got=f"{kinds[0].tokens} + {wanted.lengths.longest} tokens",
            needed=f"at most {preset.max_tokens}",
            do="Lower --prompt-tokens, --vision-tokens, --text-tokens or --response.",
        )
    _write_rows(folder, [kinds[number % len(kinds)] for number in range(wanted.steps * wanted.prompts)])
    config = folder / "config.yaml"
    config.write_text(dumps(values), encoding="utf-8")
    return Workload(
        config=config,
        prompt_tokens=kinds[0].tokens,
        vision_tokens=fmean(kind.vision_tokens for kind in kinds),
        group_size=wanted.group_size,
        lengths=wanted.lengths,
        prompts=wanted.prompts,
    )


def question(text_tokens: int, tokenizer: TextTokenizer) -> str:
    """A text of exactly so many tokens: sentences, filled up with digits, of which each is a token.

    Raises:
        ConfigError: fewer than one.
    """
    if text_tokens < 1:
        raise ConfigError("A question needs a token", got=str(text_tokens), needed="at least 1", where="--text-tokens")
    text = ""
    for word in _words():
        if len(tokenizer.encode(text + word)) > text_tokens:
            break
        text += word
    text += "".join(str(digit % 10) for digit in range(text_tokens - len(tokenizer.encode(text))))
    found = len(tokenizer.encode(text))
    assert found == text_tokens, f"a question of {found} tokens instead of {text_tokens}"
    return text


class _Kind(Struct, frozen=True, kw_only=True):
    """Rows that differ in their pixels only: sizes in pixels, counts in tokens."""

    layout: Layout
    pixels: tuple[tuple[int, int], ...]
    """Width and height of each picture."""
    text: str
    vision_tokens: int
    tokens: int

    def row(self, files: Sequence[str]) -> dict[str, object]:
        """A row over these files, one a picture."""
        count, kind = (1, "video") if self.layout.video else (len(files), "image")
        content = [*({"type": kind} for _ in range(count)), {"type": "text", "text": self.text}]
        prompt = [{"role": "user", "content": content}]
        return {"prompt": prompt, "videos": [list(files)]} if self.layout.video else {"prompt": prompt, "images": files}


class _Prompts:
    """How the model in a folder counts."""

    def __init__(self, model: Path) -> None:
        self.shape: ModelShape = read_shape(model)
        self.rules: Rules = read_rules(model, self.shape)
        self._tokenizer = TextTokenizer(model)
        self._maker = PromptMaker(self._tokenizer, self.shape)

    def kind(self, layout: Layout, wanted: Wanted) -> _Kind:
        """Rows of a layout. Raises ConfigError if its pictures are not taken as they are, or leave no room."""
        factor = self.rules.image.factor
        pixels = tuple((columns * factor, rows * factor) for columns, rows in layout.sizes)
        grids = self._grids(layout, pixels)
        vision = sum(grid.tokens(self.shape.vision.merge) for grid in grids)
        made = _Kind(layout=layout, pixels=pixels, text="0", vision_tokens=vision, tokens=0)
        others = self._tokens(made, grids) - 1
        words = wanted.prompt_tokens - others if wanted.prompt_tokens else wanted.text_tokens
        if words < 1 and wanted.prompt_tokens:
            raise ConfigError(
                "The media leave no room for a question",
                got=f"{others} tokens without it",
                needed=f"fewer than {wanted.prompt_tokens}",
                do="Lower --vision-tokens, or raise --prompt-tokens.",
                where="--prompt-tokens",
            )
        return _Kind(
            layout=layout,
            pixels=pixels,
            text=question(words, self._tokenizer),
            vision_tokens=vision,
            tokens=others + words,
        )

    def _grids(self, layout: Layout, pixels: Sequence[tuple[int, int]]) -> list[Grid]:
        merge = self.shape.vision.merge
        if layout.video:
            width, height = pixels[0]
            grids = [video_grid(len(pixels), height, width, self.rules.video)]
        else:
            grids = [image_grid(height, width, self.rules.image) for width, height in pixels]
        for (columns, rows), grid in zip(layout.sizes, grids, strict=False):
            if (grid.width, grid.height) != (columns * merge, rows * merge):
                raise ConfigError(
                    "The model does not take a picture of this size as it is",
                    got=f"{columns} x {rows} tokens",
                    needed=f"such as {grid.width // merge} x {grid.height // merge}",
                    do="Change --vision-tokens or --video.",
                    where="--vision-tokens",
                )
        return grids

    def _tokens(self, kind: _Kind, grids: Sequence[Grid]) -> int:
        row = kind.row(["picture"] * len(kind.pixels))
        skeleton = self._maker.skeleton(parse(json.dumps(row).encode(), 0))
        rates = [2.0 if kind.layout.video else None for _ in grids]
        return len(self._maker.finish(skeleton, grids, rates).ids)


def _check(wanted: Wanted, preset: Preset) -> None:
    """What can be refused before anything is written."""
    if wanted.mixed and not wanted.prompt_tokens:
        raise ConfigError(
            "Pictures of several sizes give prompts of one length only if the questions fill up",
            needed="--prompt-tokens with --mixed",
            where="--mixed",
        )
    if wanted.mixed and wanted.video_frames:
        raise ConfigError("A row has pictures or a video", got="--mixed and --video", do="Choose one.", where="--video")
    if wanted.prompt_tokens + wanted.lengths.longest > preset.max_tokens:
        raise ConfigError(
            "A prompt and its response are longer than the model takes",
            got=f"{wanted.prompt_tokens} + {wanted.lengths.longest} tokens",
            needed=f"at most {preset.max_tokens}",
            do="Lower --prompt-tokens or --response.",
        )


def _layouts(wanted: Wanted, prompts: _Prompts) -> tuple[Layout, ...]:
    vision = wanted.vision_tokens or mostly_vision(wanted.prompt_tokens)
    if wanted.video_frames:
        return (video_layout(vision, wanted.video_frames, prompts.shape.vision.temporal_patch),)
    if wanted.mixed:
        return mixed_layouts(vision)
    factor = prompts.rules.image.factor
    width, height = picture_size(vision, prompts.rules.image)
    return (Layout(sizes=((width // factor, height // factor),)),)


def _write_rows(folder: Path, kinds: Sequence[_Kind]) -> None:
    """Pictures, no two alike, and rows.jsonl."""
    album = Album()
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    todo = [(row, size) for row, kind in enumerate(kinds) for size in kind.pixels]

    def write(number: int) -> str:
        (width, height) = todo[number][1]
        return f"images/{save(album.picture(number, width, height), images, f'{number:03}')}"

    with ThreadPoolExecutor(min(_WRITERS, os.cpu_count() or 1)) as pool:  # Pillow works without the interpreter's lock
        files = list(pool.map(write, range(len(todo))))
    by_row: dict[int, list[str]] = {}
    for (row, _), file in zip(todo, files, strict=True):
        by_row.setdefault(row, []).append(file)
    rows: list[dict[str, Any]] = [kind.row(by_row[number]) for number, kind in enumerate(kinds)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows), encoding="utf-8")


def _words() -> Iterator[str]:
    words = _WORDS.split()
    yield words[0]
    number = 1
    while True:
        yield " " + words[number % len(words)]
        number += 1
