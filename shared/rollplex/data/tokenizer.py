"""The model's tokenizer, from tokenizer.json by the `tokenizers` library. Runs no code of the model folder.

Owns encoding without truncation or padding, decoding without special tokens, and where the chat template lies. Starts
in a few hundredths of a second, where transformers takes half a second. Does not know rows or images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from rollplex.data.template import ChatTemplate
from rollplex.errors import ConfigError, ModelError
from rollplex.layout.fields import load
from rollplex.layout.folder import refuse_code

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextTokenizer:
    """Text to ids and back.

    Raises:
        ModelError: no tokenizer.json, one that cannot be read, or a model folder that wants its own code run.
    """

    def __init__(self, folder: Path) -> None:
        refuse_code(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                "The model folder has no tokenizer.json",
                do="Save it once with AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
                where=str(folder),
            )
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise ModelError("tokenizer.json cannot be read", got=str(error), where=str(file)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        settings = folder / "tokenizer_config.json"
        self._settings = load(settings) if settings.is_file() else {}
        self._check_added_tokens(str(settings))

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is added in front or behind."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def spelled(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens too."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def text_of(self, token_id: int) -> str:
        """The text of one id, special or not. Raises ModelError if there is none."""
        text = self._tokenizer.id_to_token(token_id)
        if text is None:
            raise ModelError("config.json names an id that the tokenizer lacks", got=str(token_id), where=self.where)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a special token: kept whole when text is encoded, left out when ids are decoded."""
        added = self._tokenizer.get_added_tokens_decoder().get(token_id)
        return added is not None and added.special

    def id_of(self, token: str) -> int:
        """The id of a token that the configuration names. Raises ConfigError if the text is not one token."""
        token_id = self._tokenizer.token_to_id(token)
        if token_id is not None:
            return token_id
        ids = self.encode(token)
        if len(ids) == 1 and self._tokenizer.decode(ids, skip_special_tokens=False) == token:
            return ids[0]
        raise ConfigError(
            "This text is not a token of the model",
            got=f"{token!r}, which is {len(ids)} tokens",
            needed="one token",
            where=self.where,
        )

    @property
    def where(self) -> str:
        return str(self._folder / "tokenizer.json")

    def template(self, file: Path | None = None) -> ChatTemplate:
        """The chat template: chat_template.jinja, else chat_template.json, else tokenizer_config.json.

        Args:
            file: jinja2, in their place.

        Raises:
            ModelError: none of them, or one that does not compile.
            ConfigError: `file` cannot be read.
        """
        special = {name: _token_text(self._settings.get(name)) for name in _SPECIAL}
        source, where = self._template_source() if file is None else (_read(file), str(file))
        return ChatTemplate(source, {name: text for name, text in special.items() if text is not None}, where)

    def _template_source(self) -> tuple[str, str]:
        jinja = self._folder / "chat_template.jinja"
        if jinja.is_file():
            return jinja.read_text(encoding="utf-8"), str(jinja)
        of_processor = self._folder / "chat_template.json"
        if of_processor.is_file():
            value = load(of_processor).get("chat_template")
            if isinstance(value, str):
                return value, str(of_processor)
        where = str(self._folder / "tokenizer_config.json")
        value = self._settings.get("chat_template")
        if isinstance(value, list):
            named = [cast("dict[str, object]", item) for item in value if isinstance(item, dict)]
            value = next((item.get("template") for item in named if item.get("name") == "default"), None)
        if isinstance(value, str):
            return value, where
        raise ModelError(
            "The model has no chat template",
            needed="chat_template.jinja, chat_template.json, or chat_template in tokenizer_config.json",
            do="Use plain-text prompts, or add the template.",
            where=str(self._folder),
        )

    def _check_added_tokens(self, where: str) -> None:
        """transformers would add tokens of tokenizer_config.json that tokenizer.json lacks; ours must agree instead."""
        added = self._settings.get("added_tokens_decoder")
        if not isinstance(added, dict):
            return
        for key, value in cast("dict[str, object]", added).items():
            text = _token_text(value)
            if text is None or self._tokenizer.token_to_id(text) != int(key):
                raise ModelError(
                    "tokenizer_config.json and tokenizer.json disagree about a token",
                    got=f"id {key}, {text!r}",
                    needed="the same token with the same id in both",
                    do="Save it once with AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
                    where=where,
                )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("The chat template cannot be read", got=str(error), where="data.chat_template") from error


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = cast("Mapping[str, object]", value).get("content")
    return value if isinstance(value, str) else None
