"""One row as the model takes it: its media decoded and patched, its prompt tokenized and expanded.

Knows neither checks nor segments.
"""

from __future__ import annotations

from rollplex.data.images import ImageFolder
from rollplex.data.inputs import Prepared
from rollplex.data.patches import Patches, image_patches
from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.rows import Row
from rollplex.data.videos import Videos


def prepare_row(row: Row, images: ImageFolder, videos: Videos, maker: PromptMaker, rules: Rules) -> Prepared:
    """Decode, patch and tokenize one row.

    Raises:
        DataError: the row cannot be used; says why, not where.
    """
    skeleton = maker.skeleton(row)
    patched = iter(image_patches(images.load(place), rules.image) for place in row.images)
    clips = iter(videos.patches(video, rules.video) for video in row.videos)
    media: list[Patches] = []
    seconds: list[float | None] = []
    for kind in skeleton.kinds:
        if kind == "image":
            media.append(next(patched))
            seconds.append(None)
        else:
            patches, fps = next(clips)
            media.append(patches)
            seconds.append(rules.video.temporal_patch / fps)
    prompt = maker.finish(skeleton, [patches.grid for patches in media], seconds)
    return Prepared(row=row.number, prompt=prompt, media=tuple(media))
