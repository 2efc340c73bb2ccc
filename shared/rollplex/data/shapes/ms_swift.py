"""ms-swift's shape: "messages"; the assistant's last one is not part of the prompt, as in ms-swift's own GRPO.

What it said is the column "solution", unless the row has one.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollplex.data.shapes.base import Shape, list_of_objects, split_answer
from rollplex.protocol.inputs import ShapeName

_FORM = '[{"role": …, "content": …}, …]'


def _messages(value: object) -> object:
    return split_answer(list_of_objects(value, "messages", _FORM))[0]


def _more(fields: Mapping[str, object]) -> dict[str, object]:
    answer = split_answer(list_of_objects(fields["messages"], "messages", _FORM))[1]
    return {} if answer is None else {"solution": answer}


MS_SWIFT = Shape(name=ShapeName.MS_SWIFT, needs=("messages",), prompt="messages", to_prompt=_messages, more=_more)
