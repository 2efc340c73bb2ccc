"""Writes a workload: a model, rows with real pictures, and a configuration, all of exactly known token counts.

    FOLDER/model        a preset with fresh weights
    FOLDER/images       photographs of a size that gives the vision tokens asked for
    FOLDER/rows.jsonl   one picture and one question each; the question has the text tokens asked for
    FOLDER/config.yaml  GRPO with a reference model; every response has the length asked for, whatever is sampled

Runs nothing. The same arguments give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from rollplex.bench.lengths import Lengths
from rollplex.bench.pictures import picture_size, pictures
from rollplex.bench.summary import token_ceiling
from rollplex.config.loading import from_mapping
from rollplex.config.yaml_text import dumps
from rollplex.data.patches import image_grid
from rollplex.data.processor import read_rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.rows import parse
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import ConfigError
from rollplex.layout.shape import read_shape
from rollplex.presets import SMALL, SPECIAL_TOKENS, write_preset
from rollplex.presets.architecture import MAX_TOKENS
from rollplex.presets.tokenizer import END_OF_TURN

STEPS_OF_ROWS: Final = 4
"""Different steps that the rows give before they come again in another order."""
_WORDS: Final = (
    "Look at the picture and describe what you see. Think about the question before you answer, "
    "and give the final answer at the end. "
)


class Workload(Struct, frozen=True, kw_only=True):
    """What `write_workload` wrote."""

    config: Path
    prompt_tokens: int
    """Of every prompt, as tokenised with its picture: P."""
    vision_tokens: int
    """Of them the picture's."""
    group_size: int
    lengths: Lengths
    prompts: int
    """Of one iteration."""

    @property
    def token_ceiling(self) -> float:
        """What sharing could gain at most in scoring and training, by tokens through the language model."""
        lengths = self.lengths.of(self.group_size * self.prompts)
        return token_ceiling(self.prompt_tokens, sum(lengths) / len(lengths), self.group_size)


def write_workload(
    folder: Path,
    *,
    vision_tokens: int,
    text_tokens: int,
    lengths: Lengths,
    group_size: int,
    prompts: int,
    preset: str = SMALL.name,
) -> Workload:
    """Write the folder; files of the same names are replaced.

    Args:
        vision_tokens: of each prompt's picture, after merging.
        text_tokens: of each prompt's question; the chat template adds a few.
        lengths: of the responses.
        group_size: responses of a prompt.
        prompts: of one iteration.
        preset: name of the model's preset.

    Raises:
        ConfigError: an unknown preset, or numbers that no prompt or run can have.
        DataError: scikit-learn is not installed.
        OSError: the folder cannot be written.
    """
    values = make_config(lengths=lengths, group_size=group_size, prompts=prompts)
    from_mapping(values)  # refused before anything is written
    model = write_preset(preset, folder / "model")
    shape = read_shape(model)
    tokenizer, rules = TextTokenizer(model), read_rules(model, shape).image
    width, height = picture_size(vision_tokens, rules)
    row = _row("images/000.png", question(text_tokens, tokenizer))
    maker = PromptMaker(tokenizer, shape)
    skeleton = maker.skeleton(parse(json.dumps(row).encode(), 0))
    prompt_tokens = len(maker.finish(skeleton, [image_grid(height, width, rules)], [None]).ids)
    if prompt_tokens + lengths.longest > MAX_TOKENS:
        raise ConfigError(
            "A prompt and its response are longer than the model takes",
            got=f"{prompt_tokens} + {lengths.longest} tokens",
            needed=f"at most {MAX_TOKENS}",
            do="Lower --vision-tokens, --text-tokens or --response.",
        )
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, picture in enumerate(pictures(STEPS_OF_ROWS * prompts, width, height)):
        name = f"images/{number:03}.png"
        picture.save(folder / name)
        rows.append({**row, "images": [name]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows), encoding="utf-8")
    config = folder / "config.yaml"
    config.write_text(dumps(values), encoding="utf-8")
    return Workload(
        config=config,
        prompt_tokens=prompt_tokens,
        vision_tokens=vision_tokens,
        group_size=group_size,
        lengths=lengths,
        prompts=prompts,
    )


def make_config(*, lengths: Lengths, group_size: int, prompts: int) -> dict[str, object]:
    """The workload's configuration; paths are relative to its folder.

    Prefixes and suffixes are computed a prompt at a time, so that the schedules have something to arrange.
    """
    return {
        "run": {"name": "bench", "seed": 0, "iterations": 100},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"path": "rows.jsonl", "prompts_per_iteration": prompts},
        "rollout": {
            "group_size": group_size,
            "max_new_tokens": lengths.longest,
            "never_sample": [token for token in SPECIAL_TOKENS if token != END_OF_TURN],
            "forced_lengths": list(lengths.of(group_size * prompts)),
        },
        "rewards": {"functions": [{"function": "rollplex.bench.rewards:spread"}]},
        "algorithm": {"loss": "grpo", "beta": 0.04},
        "optimizer": {"name": "adamw", "lr": 1.0e-5},
        "batching": {"prefix_prompts": 1, "suffix_prompts": 1},
        "checkpoint": {"every": 0},
    }


def question(text_tokens: int, tokenizer: TextTokenizer) -> str:
    """A text of exactly so many tokens: sentences, filled up with digits, of which each is a token.

    Raises:
        ConfigError: fewer than one.
    """
    if text_tokens < 1:
        raise ConfigError("A question needs a token", got=str(text_tokens), needed="at least 1", where="--text-tokens")
    text = ""
    for word in _words():
        if len(tokenizer.encode(text + word)) > text_tokens:
            break
        text += word
    text += "".join(str(digit % 10) for digit in range(text_tokens - len(tokenizer.encode(text))))
    found = len(tokenizer.encode(text))
    assert found == text_tokens, f"a question of {found} tokens instead of {text_tokens}"
    return text


def _words() -> Iterator[str]:
    words = _WORDS.split()
    yield words[0]
    number = 1
    while True:
        yield " " + words[number % len(words)]
        number += 1


def _row(image: str, text: str) -> dict[str, object]:
    content = [{"type": "image"}, {"type": "text", "text": text}]
    return {"prompt": [{"role": "user", "content": content}], "images": [image]}
