"""What SGLang's tokenizer side is told of a prompt's pictures, in the rollout process, for SGLang 0.5.17.

Owns: an image processor that processes nothing. All is known (`requests`), and the pixels stay where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
    MultimodalProcessorOutput,
)

from rollplex.layout.shape import ModelShape
from rollplex_rollout.sglang.hooks import PLACE
from rollplex_rollout.sglang.requests import Medium, Pictures


class PictureProcessor:
    """In place of the tokenizer manager's `mm_processor`."""

    prefer_tokenized_input = True

    def __init__(self, shape: ModelShape) -> None:
        self._marks = {
            "im_token_id": shape.image_id,
            "video_token_id": shape.video_id,
            "im_start_id": shape.vision_start_id,
            "im_end_id": shape.vision_end_id,
        }

    async def process_mm_data_async(
        self, *, image_data: list[Pictures], input_text: list[int], **_others: Any
    ) -> MultimodalProcessorOutput:
        """Args, by SGLang's names: image_data: one for all media of the prompt. input_text: its ids."""
        (pictures,) = image_data
        items = [_item(medium) for medium in pictures.media]
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=input_text,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(input_text, items),
            mrope_positions=pictures.positions,
            mrope_position_delta=torch.tensor([[pictures.position_delta]]),
            **self._marks,
        )


def _item(medium: Medium) -> MultimodalDataItem:
    grid = "video_grid_thw" if medium.video else "image_grid_thw"
    item = MultimodalDataItem(
        modality=Modality.VIDEO if medium.video else Modality.IMAGE,
        format=MultimodalInputFormat.PROCESSOR_OUTPUT,
        offsets=[(medium.first, medium.last)],
        model_specific_data={grid: torch.tensor(medium.frames), PLACE: (medium.offset, medium.rows, medium.video)},
    )
    item.set_hash(medium.name)
    return item
