"""EasyR1's format prompt: a jinja2 text around each question, which is `content` in it. Rendered in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
from jinja2 import meta, sandbox

from rollplex.errors import ConfigError, DataError

VARIABLE = "content"


class FormatPrompt:
    """One compiled format prompt.

    Args:
        source: jinja2, or, if it has no place for a question, the path of a file of it; blanks at its ends are left
            out, as EasyR1 does.

    Raises:
        ConfigError: it cannot be read, does not compile, does not use the question, or asks for anything else.
    """

    def __init__(self, source: str) -> None:
        self.source = (source if "{{" in source else _read(Path(source))).strip()
        environment = sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
        try:
            unknown = meta.find_undeclared_variables(environment.parse(self.source))
            self._template = environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(
                "The format prompt does not compile", got=str(error), where="data.format_prompt"
            ) from error
        if unknown != {VARIABLE}:
            raise ConfigError(
                "The format prompt uses other variables than the question",
                got=", ".join(sorted(unknown)) or "none",
                needed=f"{{{{ {VARIABLE} }}}}, and no other",
                where="data.format_prompt",
            )

    def text(self, question: str) -> str:
        """The text around a question. Raises DataError."""
        try:
            return self._template.render({VARIABLE: question})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(
                "The format prompt fails on this row", got=reason, do="Change data.format_prompt."
            ) from error

    def prompt(self, prompt: str | Sequence[dict[str, object]]) -> str | list[dict[str, object]]:
        """A prompt with the text of its last user message, or the plain text, put into the format.

        Raises:
            DataError: there is no such message, or it is a list of parts.
        """
        if isinstance(prompt, str):
            return self.text(prompt)
        messages = list(prompt)
        at = next((index for index in reversed(range(len(messages))) if messages[index]["role"] == "user"), None)
        content = None if at is None else messages[at]["content"]
        if at is None or not isinstance(content, str):
            raise DataError(
                "The format prompt has no question to be put around",
                got="no user message" if at is None else f"message {at}, a list of parts",
                needed="a user message that is text",
                do="Take data.format_prompt out.",
            )
        messages[at] = {**messages[at], "content": self.text(content)}
        return messages


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "The format prompt cannot be read",
            got=f"{str(path)[:200]!r}: {error.strerror if isinstance(error, OSError) else error}",
            needed=f"a text with {{{{ {VARIABLE} }}}} in it, or a file",
            where="data.format_prompt",
        ) from error
