"""The tokenizer of the presets: a byte-level BPE in Qwen2.5-VL's form, trained on a page of text. Knows no model.

The ids are those of the vocabulary's size exactly: no id is without a token, so none decodes to nothing. A vocabulary
larger than the page gives merges for is filled up with tokens that no text becomes; they decode to " w512", " w513", ….
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

IMAGE: Final = "<|image_pad|>"
VIDEO: Final = "<|video_pad|>"
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
VISION_PAD: Final = "<|vision_pad|>"
END_OF_TURN: Final = "<|im_end|>"
PADDING: Final = "<|endoftext|>"
SPECIAL_TOKENS: Final = (
    PADDING,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    VISION_START,
    VISION_END,
    VISION_PAD,
    IMAGE,
    VIDEO,
)
"""In Qwen2.5-VL's order; they take the last ids."""

_SPLIT = (  # Qwen2's pre-tokenizer, from its published tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}{{ raise_exception('unknown part of a message: ' + part['type']) }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's, without its default system message: a tiny model's prompts stay short."""

_TEXT = """\
Which digit is this? The digit in the picture is zero, one, two, three, four, five, six, seven, eight or nine.
What is the number in this image? It is a three. It is an eight. How many squares are there in the picture?
There are four squares: one red, one green, one blue and one yellow. What colour is the square on the left?
The square on the left is red, the one on the right is blue, and the circle between them is yellow.
Look at the image and answer the question with one word. The answer is seven. The answer is nine.
A person writes a number by hand, and somebody else has to read it. Some write their sevens with a stroke,
some close the top of the four, and a hurried six can look like a zero. Read each line from left to right.
Describe what you see in this picture. I can see two people who are standing in front of a white house.
Behind the house there are five trees, and over the trees the sky is clear. The child holds a green ball.
Count the windows of the house: first the upper row, then the lower row. There are six windows in all.
Is the door open or closed? The door is closed, but the window over the door is open.
Think about the question before you answer. If something cannot be seen in the image, then say so.
What does the sign on the wall say? The sign says that the shop is open every day from nine to six.
How much do two apples and three pears cost together? Two apples cost four, three pears cost five, so nine.
The table shows the number of cars in each year. In which year were there more cars than in the year before?
Where is the black cat? The black cat is under the table, next to the small brown box with the letters.
Please give the final answer at the end, after the word answer, and nothing else. Yes. No. True. False.
"""


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """Ids that config.json and generation_config.json name."""

    image: int
    video: int
    vision_start: int
    vision_end: int
    vision_pad: int
    end_of_turn: int
    padding: int


def build_tokenizer(vocab: int, words: int = 0) -> Tokenizer:
    """Train the tokenizer so that it has exactly `vocab` ids; the same each time.

    Args:
        vocab: all ids.
        words: of them those that texts become, special ones included; 0: all. The text above gives merges for up to
            about 900.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=(words or vocab) - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    if words and words < vocab:
        tokenizer = _filled(tokenizer, vocab - len(SPECIAL_TOKENS))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    size = tokenizer.get_vocab_size()
    assert size == vocab, f"the text gives {size} of {vocab} ids"
    return tokenizer


def _filled(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """The same with tokens up to `size` that no merge leads to."""
    content = json.loads(tokenizer.to_str())
    words = content["model"]["vocab"]
    words |= {f"\u0120w{number}": number for number in range(len(words), size)}  # U+0120 is the alphabet's space
    return Tokenizer.from_str(json.dumps(content))


def token_ids(tokenizer: Tokenizer) -> TokenIds:
    """The special ids of a tokenizer made here."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return TokenIds(
        image=ids[IMAGE],
        video=ids[VIDEO],
        vision_start=ids[VISION_START],
        vision_end=ids[VISION_END],
        vision_pad=ids[VISION_PAD],
        end_of_turn=ids[END_OF_TURN],
        padding=ids[PADDING],
    )


def tokenizer_files(tokenizer: Tokenizer, max_tokens: int) -> dict[str, str]:
    """The texts of tokenizer.json, tokenizer_config.json, vocab.json and merges.txt, as Qwen2.5-VL's folders have them.

    Args:
        max_tokens: the longest text that the model takes.
    """
    text = tokenizer.to_str(pretty=True)
    bpe = cast("dict[str, object]", json.loads(text)["model"])
    merges = cast("list[list[str]]", bpe["merges"])
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for token in SPECIAL_TOKENS
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": max_tokens,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (PADDING, END_OF_TURN)],
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False),
        "vocab.json": json.dumps(bpe["vocab"], ensure_ascii=False),
        "merges.txt": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges),
    }


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    """Write each text as a file of that name."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
