"""LLaVA's shape, which VLM-R1 takes: "conversations", turns of "from" and "value".

The assistant's last turn is not part of the prompt; what it said is the column "solution", unless the row has one.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollplex.data.shapes.base import Shape, list_of_objects, split_answer
from rollplex.data.stores.base import kind_of
from rollplex.errors import DataError
from rollplex.protocol.inputs import ShapeName

_FORM = '[{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]'
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def _turns(value: object) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []
    for index, turn in enumerate(list_of_objects(value, "conversations", _FORM)):
        speaker = turn.get("from")
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise DataError(
                f'"conversations"[{index}] has no known speaker', got=kind_of(speaker), needed=", ".join(_ROLES)
            )
        messages.append({"role": role, "content": turn.get("value")})
    return messages


def _messages(value: object) -> object:
    return split_answer(_turns(value))[0]


def _more(fields: Mapping[str, object]) -> dict[str, object]:
    answer = split_answer(_turns(fields["conversations"]))[1]
    return {} if answer is None else {"solution": answer}


LLAVA = Shape(name=ShapeName.LLAVA, needs=("conversations",), prompt="conversations", to_prompt=_messages, more=_more)
