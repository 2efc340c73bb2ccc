"""Chat templates, rendered as transformers renders them: jinja2 in an immutable sandbox.

Owns the environment of a template (what transformers 5.24's `render_jinja_template` gives it). A template can neither
reach Python's objects nor read the clock: a prompt must be the same at every time. Does not know rows or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from rollplex.errors import DataError, ModelError

Message = Mapping[str, object]


class _Generation(ext.Extension):
    """`{% generation %}` marks the assistant's text for supervised training; for prompts it renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: parser.Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled template.

    Args:
        source: jinja2.
        special: names such as bos_token to their texts, visible to the template.
        where: the file, for errors.

    Raises:
        ModelError: a template that does not compile.
    """

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _no_clock
        self._special = dict(special)
        self._where = where
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError("The chat template does not compile", got=str(error), where=where) from error

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, ready for the assistant's answer.

        Raises:
            DataError: the template refused the messages.
            ModelError: the template itself failed or reached for what the sandbox forbids.
        """
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except _RefusedError as error:
            raise DataError("The chat template refuses these messages", got=str(error), where=self._where) from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ModelError("The chat template failed", got=reason, where=self._where) from error


class _RefusedError(jinja2.TemplateError):
    pass


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _no_clock(_format: str) -> NoReturn:
    raise jinja2.exceptions.SecurityError("the template asks for the date; prompts must be the same at every time")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
