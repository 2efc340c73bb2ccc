"""EasyR1's shape: "problem" is the user's text, "answer" what a reward function compares with."""

from __future__ import annotations

from collections.abc import Mapping

from rollplex.data.shapes.base import Shape
from rollplex.data.stores.base import kind_of
from rollplex.errors import DataError
from rollplex.protocol.inputs import ShapeName


def _question(value: object) -> object:
    if not isinstance(value, str):
        raise DataError('"problem" has the wrong form', got=kind_of(value), needed="text")
    return [{"role": "user", "content": value}]


def _more(fields: Mapping[str, object]) -> dict[str, object]:
    return {"ground_truth": fields["answer"]}


EASYR1 = Shape(name=ShapeName.EASYR1, needs=("problem", "answer"), prompt="problem", to_prompt=_question, more=_more)
