"""verl's shape: "prompt" is a conversation; the answer is "ground_truth" inside "reward_model"."""

from __future__ import annotations

from collections.abc import Mapping

from rollplex.data.shapes.base import Shape, list_of_objects
from rollplex.data.stores.base import kind_of
from rollplex.errors import DataError
from rollplex.protocol.inputs import ShapeName


def _messages(value: object) -> object:
    return list_of_objects(value, "prompt", '[{"role": …, "content": …}, …]')


def _more(fields: Mapping[str, object]) -> dict[str, object]:
    """What verl's reward functions are called with beside "data_source" and "extra_info", which are columns."""
    model = fields.get("reward_model")
    if not isinstance(model, dict) or "ground_truth" not in model:
        raise DataError(
            '"reward_model" has no ground truth', got=kind_of(model), needed='{"style": …, "ground_truth": …}'
        )
    return {"ground_truth": model["ground_truth"], "extra_info": fields.get("extra_info") or {}}


VERL = Shape(
    name=ShapeName.VERL,
    needs=("prompt", "data_source", "reward_model"),
    prompt="prompt",
    to_prompt=_messages,
    more=_more,
)
