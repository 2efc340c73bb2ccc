"""A model folder as Qwen2.5-VL has it, without weights; pictures; datasets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollplex.data.processor import Rules, read_rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.tokenizer import TextTokenizer
from rollplex.layout.shape import ModelShape, read_shape
from rollplex.protocol.inputs import DataSource

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = ["what is the colour of the square? It is red, green, blue or yellow.", "You are a helpful assistant."] * 4


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    ids = {text: vocabulary[text] for text in SPECIAL}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config(ids)))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12_845_056}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def config(ids: dict[str, int]) -> dict[str, Any]:
    text = {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    vision |= {"fullatt_block_indexes": [0], "tokens_per_second": 4}
    return {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "tie_word_embeddings": True,
    }


@pytest.fixture(scope="session")
def shape(model_folder: Path) -> ModelShape:
    return read_shape(model_folder)


@pytest.fixture(scope="session")
def rules(model_folder: Path, shape: ModelShape) -> Rules:
    return read_rules(model_folder, shape)


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> TextTokenizer:
    return TextTokenizer(model_folder)


@pytest.fixture(scope="session")
def maker(tokenizer: TextTokenizer, shape: ModelShape) -> PromptMaker:
    return PromptMaker(tokenizer, shape)


@pytest.fixture(scope="session")
def picture() -> Callable[[int, int, int], Image.Image]:
    """An RGB picture of noise: picture(width, height, seed)."""

    def make(width: int, height: int, seed: int) -> Image.Image:
        numbers = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(numbers)

    return make


@pytest.fixture
def images(tmp_path: Path, picture: Callable[[int, int, int], Image.Image]) -> Path:
    """A folder with a.png (60 x 84), b.jpg (112 x 56) and six frames f0.png … f5.png (64 x 64)."""
    folder = tmp_path / "images"
    folder.mkdir()
    picture(60, 84, 1).save(folder / "a.png")
    picture(112, 56, 2).save(folder / "b.jpg", quality=95)
    for frame in range(6):
        picture(64, 64, 10 + frame).save(folder / f"f{frame}.png")
    return folder


Dataset = Callable[..., DataSource]


@pytest.fixture
def dataset(tmp_path: Path, images: Path) -> Dataset:
    """Write rows (objects, or lines as they are) and describe the dataset: dataset(rows, **fields of DataSource)."""

    def make(rows: Sequence[object], **fields: Any) -> DataSource:
        path = tmp_path / f"{fields.get('name', 'train')}.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        values = {"name": "train", "max_prompt_tokens": 0, "max_image_pixels": 2**24, "skip_bad_rows": False, **fields}
        return DataSource(path=str(path), image_dir=str(images), **values)

    return make
