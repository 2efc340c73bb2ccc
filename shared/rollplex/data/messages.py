"""The form of a prompt: a text, or messages of "role" and "content", which is a text or a list of parts. Pure."""

from __future__ import annotations

from typing import TypeAlias, cast

from rollplex.data.stores.base import kind_of
from rollplex.errors import DataError

Messages: TypeAlias = list[dict[str, object]]
ROLES = ("system", "user", "assistant", "tool")


def checked_prompt(prompt: object) -> str | Messages:
    """A prompt, its form checked; keys of messages and parts that hold nothing are left out.

    Raises:
        DataError: it has another form, is empty, or ends with the assistant's message.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError("The prompt is empty", got=repr(prompt))
        return prompt
    if not isinstance(prompt, list):
        raise DataError("The prompt has the wrong form", got=kind_of(prompt), needed="text, or a list of messages")
    messages = [_message(item, index) for index, item in enumerate(prompt)]
    if not any(_says_something(message["content"]) for message in messages):
        raise DataError("The prompt is empty", got=f"{len(messages)} messages without content")
    if messages[-1]["role"] == "assistant":
        raise DataError("The last message is the assistant's", needed="a message for it to answer")
    return messages


def _message(value: object, index: int) -> dict[str, object]:
    name = f"message {index}"
    if not isinstance(value, dict):
        raise DataError(f"{name} is not an object", got=kind_of(value), needed='{"role": …, "content": …}')
    message = {key: item for key, item in cast("dict[str, object]", value).items() if item is not None}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        what = f"{name} has {'an unknown' if isinstance(role, str) and role else 'no'} role"
        raise DataError(what, got=kind_of(role), needed='"system", "user", "assistant" or "tool"')
    if isinstance(content, list):
        message["content"] = [_part(item, f"{name}, part {part}") for part, item in enumerate(content)]
    elif not isinstance(content, str):
        raise DataError(f"{name} has no content", got=kind_of(content), needed="text, or a list of parts")
    return message


def _part(value: object, name: str) -> dict[str, object]:
    part = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else None
    if part is None or part.get("type") not in {"text", "image", "video"}:
        got = kind_of(value) if part is None else f"type {part.get('type')!r}"
        raise DataError(f"{name} is of no known type", got=got, needed='"text", "image" or "video"')
    if part["type"] == "text":
        if not isinstance(part.get("text"), str):
            raise DataError(f"{name} has no text", got=kind_of(part.get("text")), needed='{"type": "text", "text": …}')
    elif len(part) > 1:
        raise DataError(
            f"{name} names its file itself",
            got=f"keys {sorted(part)}",
            needed=f'{{"type": "{part["type"]}"}}, and the path in the column "{part["type"]}s"',
        )
    return part


def _says_something(content: object) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    parts = cast("list[dict[str, object]]", content)
    return any(part["type"] != "text" or str(part["text"]).strip() for part in parts)
