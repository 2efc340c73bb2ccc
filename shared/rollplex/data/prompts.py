"""From a row to the ids and positions of its prompt.

A conversation is rendered with the model's chat template; a plain text is taken as it is, as TRL does. Where media
stand:

    parts {"type": "image"} / {"type": "video"}    as the template renders them
    <image> / <video> in a message that is text    there, as EasyR1, verl and ms-swift have it
    neither, but the row has media                 before the first user message: images, then videos, as TRL has it
    <image> / <video> in a plain text              there, between the model's vision-start and vision-end tokens
    <image> in a row without images                nowhere: it is text; likewise <video> without videos

Each placeholder token is then repeated, once for each token of its medium. Owns that and its checks; knows neither
files nor pixels: it is given the grids.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from rollplex.data.patches import Grid
from rollplex.data.positions import Medium, mrope_positions
from rollplex.data.renames import rename_to_media
from rollplex.data.rows import Row
from rollplex.data.template import ChatTemplate
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import DataError, ModelError
from rollplex.layout.shape import ModelShape

_MARKS = re.compile(r"(<image>|<video>)")
_KINDS = {"<image>": "image", "<video>": "video"}

Ids = npt.NDArray[np.int64]


class Skeleton(Struct, frozen=True, kw_only=True, eq=False):
    """A prompt whose placeholders are not yet repeated."""

    ids: Ids
    places: npt.NDArray[np.intp]
    """Indices of the placeholders in `ids`, all media together."""
    kinds: tuple[str, ...]
    """"image" or "video" for each place."""


class Prompt(Struct, frozen=True, kw_only=True, eq=False):
    """A prompt as the model takes it."""

    ids: Ids
    """[tokens]"""
    positions: Ids
    """[3, tokens]"""
    next_position: int
    """Where the response goes on."""


class PromptMaker:
    """Renders, tokenizes and expands prompts for one model.

    Args:
        tokenizer: of the model.
        shape: of the model.
        template: a file, in place of the model's own chat template.

    Raises:
        ModelError: the media tokens of config.json are not single special tokens of the tokenizer, or the template does
            not compile.
        ConfigError: the template cannot be read.
    """

    def __init__(self, tokenizer: TextTokenizer, shape: ModelShape, template: Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._shape = shape
        self._template: ChatTemplate | None = None if template is None else tokenizer.template(template)
        self.template_digest = (
            b"" if template is None else hashlib.blake2b(template.read_bytes(), digest_size=32).digest()
        )
        """32 bytes of a template in place of the model's own; empty if there is none."""
        start, end = tokenizer.text_of(shape.vision_start_id), tokenizer.text_of(shape.vision_end_id)
        image, video = tokenizer.text_of(shape.image_id), tokenizer.text_of(shape.video_id)
        self._marks = {"<image>": start + image + end, "<video>": start + video + end}
        for mark, wanted in (("<image>", shape.image_id), ("<video>", shape.video_id)):
            whole = tokenizer.encode(self._marks[mark]) == [shape.vision_start_id, wanted, shape.vision_end_id]
            if not whole or not tokenizer.is_special(wanted):
                raise ModelError(
                    "The media tokens of config.json are not special tokens of the tokenizer",
                    got=f"{self._marks[mark]!r} → {tokenizer.encode(self._marks[mark])}",
                    needed=f"[{shape.vision_start_id}, {wanted}, {shape.vision_end_id}], {wanted} special",
                    where=tokenizer.where,
                )

    def render(self, row: Row) -> str:
        """The text of a prompt, each medium as one placeholder. Raises DataError."""
        if isinstance(row.prompt, str):
            kinds = _kinds(row)
            return _MARKS.sub(lambda m: self._marks[m[0]] if _KINDS[m[0]] in kinds else m[0], row.prompt)
        if self._template is None:
            self._template = self._tokenizer.template()
        return self._template.render(with_parts(row.prompt, len(row.images), len(row.videos)))

    def skeleton(self, row: Row) -> Skeleton:
        """Tokenize a prompt and find its placeholders.

        Raises:
            DataError: no tokens, or not as many placeholders as media.
        """
        ids = np.array(self._tokenizer.encode(self.render(row)), np.int64)
        if not len(ids):
            raise DataError("The prompt is empty", got="no tokens")
        if int(ids.max()) >= self._shape.vocab:
            raise ModelError(
                "The tokenizer has ids that the model lacks",
                got=str(int(ids.max())),
                needed=f"below vocab_size {self._shape.vocab}",
                where=self._tokenizer.where,
            )
        images, videos = ids == self._shape.image_id, ids == self._shape.video_id
        for name, found, given in (("image", images, row.images), ("video", videos, row.videos)):
            rename = "" if given else rename_to_media(row.columns, name)
            count = int(found.sum()) or (marks_in(row.prompt, name) if rename else 0)
            if count != len(given):
                raise DataError(
                    f"The prompt has not as many places for {name}s as the row has {name}s",
                    got=f"{count} in the rendered prompt",
                    needed=f'{len(given)}, the length of "{name}s"',
                    do=rename or _do_about_places(name, given),
                )
        places = np.flatnonzero(images | videos)
        return Skeleton(ids=ids, places=places, kinds=tuple("image" if images[at] else "video" for at in places))

    def marked(self, ids: Ids) -> str:
        """An expanded prompt as text, runs of media tokens counted: "<|vision_start|>[image 1: 64 tokens]…"."""
        media = {self._shape.image_id: "image", self._shape.video_id: "video"}
        return _marked(ids.tolist(), media, self._tokenizer.spelled)

    def finish(self, skeleton: Skeleton, grids: Sequence[Grid], seconds_per_grid: Sequence[float | None]) -> Prompt:
        """Repeat each placeholder and give every token its positions.

        Args:
            skeleton: of the row.
            grids: of the media, in the order of their placeholders.
            seconds_per_grid: likewise; None for images.
        """
        counts = np.ones(len(skeleton.ids), np.int64)
        counts[skeleton.places] = [grid.tokens(self._shape.vision.merge) for grid in grids]
        starts = np.cumsum(counts)[skeleton.places] - counts[skeleton.places]
        media = [
            Medium(start=int(start), grid=grid, seconds_per_grid=seconds)
            for start, grid, seconds in zip(starts, grids, seconds_per_grid, strict=True)
        ]
        ids = np.repeat(skeleton.ids, counts)
        positions, next_position = mrope_positions(
            len(ids), media, merge=self._shape.vision.merge, tokens_per_second=self._shape.vision.tokens_per_second
        )
        return Prompt(ids=ids, positions=positions, next_position=next_position)


def _do_about_places(kind: str, given: Sequence[object]) -> str:
    """What to do if a row has not as many media as places for them."""
    if not given:
        return f'Add the column "{kind}s", or take the places out.'
    return f'Write <{kind}> or a part {{"type": "{kind}"}} where each belongs.'


def _marked(ids: Sequence[int], media: dict[int, str], spell: Callable[[Sequence[int]], str]) -> str:
    """Ids as text, each run of a media token counted."""
    text: list[str] = []
    counts = dict.fromkeys(media.values(), 0)
    for is_medium, run in itertools.groupby(ids, key=lambda index: index if index in media else None):
        members = list(run)
        if is_medium is None:
            text.append(spell(members))
            continue
        kind = media[is_medium]
        counts[kind] += 1
        text.append(f"[{kind} {counts[kind]}: {len(members)} token{'' if len(members) == 1 else 's'}]")
    return "".join(text)


def marks_in(prompt: str | Sequence[dict[str, object]], kind: str) -> int:
    """How often <image> or <video> stands in the texts of a prompt, parts left out."""
    contents: list[object] = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    texts = [text for content in contents for text in _texts(content)]
    return sum(text.count(f"<{kind}>") for text in texts)


def _texts(content: object) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _kinds(row: Row) -> set[str]:
    """Of which kinds the row has media."""
    return {kind for kind, media in (("image", row.images), ("video", row.videos)) if media}


def with_parts(messages: Sequence[dict[str, object]], num_images: int, num_videos: int) -> list[dict[str, object]]:
    """Give every medium of a conversation its part, by the table above. Messages without media stay as they are."""
    kinds = {kind for kind, count in (("image", num_images), ("video", num_videos)) if count}
    parted = [_split(message, kinds) for message in messages]
    has_media = any(
        part["type"] != "text"
        for message in parted
        if isinstance(message["content"], list)
        for part in cast("list[dict[str, object]]", message["content"])
    )
    if has_media or not num_images + num_videos:
        return parted
    first = next((index for index, message in enumerate(parted) if message["role"] == "user"), None)
    if first is None:
        raise DataError("The row has media, but no user message to put them in", needed='a message with "role": "user"')
    content = parted[first]["content"]
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else cast("list[object]", content)
    media = [{"type": "image"}] * num_images + [{"type": "video"}] * num_videos
    parted[first] = {**parted[first], "content": [*media, *texts]}
    return parted


def _split(message: dict[str, object], kinds: set[str]) -> dict[str, object]:
    """A message with its texts cut at the marks of these kinds; typed parts stay where they are."""
    content = message["content"]
    if not any(_KINDS[mark] in kinds for text in _texts(content) for mark in _MARKS.findall(text)):
        return message
    if isinstance(content, str):
        return {**message, "content": _cut(content, kinds)}
    parts: list[object] = []
    for part in cast("list[dict[str, object]]", content):
        text = part.get("text")
        parts += _cut(text, kinds) if isinstance(text, str) else [part]
    return {**message, "content": parts}


def _cut(text: str, kinds: set[str]) -> list[dict[str, str]]:
    """A text as parts: its pieces, and a part for each mark of these kinds."""
    parts: list[dict[str, str]] = []
    for piece in _MARKS.split(text):
        if _KINDS.get(piece) in kinds:
            parts.append({"type": _KINDS[piece]})
        elif piece and parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + piece}
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts
