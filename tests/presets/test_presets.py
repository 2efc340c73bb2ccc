"""The preset model folders, opened by those who have to open them."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from rollplex.errors import ConfigError
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import media_ids, read_shape
from rollplex.layout.weight_files import placed
from rollplex.presets import PRESETS, QWEN_3B, SPECIAL_TOKENS, TINY_GPU, preset_named, write_model, write_preset
from rollplex.presets.__main__ import main
from rollplex.presets.architecture import model_config
from rollplex.presets.tokenizer import build_tokenizer, token_ids
from rollplex.presets.weights import pieces

NAMES = sorted(name for name, preset in PRESETS.items() if preset.dtype == "float32")
MATRIX_STD = 0.12
SHRUNK = replace(
    QWEN_3B,
    vocab=1024,
    hidden=256,
    layers=3,
    heads=2,
    kv_heads=1,
    intermediate=344,
    vision_depth=4,
    vision_hidden=80,
    vision_heads=1,
    vision_intermediate=107,
    vision_full=(0, 3),
)
"""Few of everything, in the form of the large one: tied, bfloat16, several files, heads of 128 and 80, an odd MLP."""
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which digit is this"}]}]
TEXTS = ["which digit is this", " three, seven\n\n  and  é😀 don't 1234", "<|im_start|>user\nx<|im_end|>", "a\r\n b"]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(name, tmp_path_factory.mktemp(name) / "model")


@pytest.fixture(scope="module")
def model_and_report(folder: Path) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_transformers_opens_the_model_and_misses_nothing(model_and_report: Any) -> None:
    _, report = model_and_report
    assert not any(report.values()), report


def test_the_stated_number_of_parameters_is_true(name: str, model_and_report: Any) -> None:
    model, _ = model_and_report
    assert sum(parameter.numel() for parameter in model.parameters()) == PRESETS[name].num_parameters


def test_the_model_has_the_weights_of_the_file(folder: Path, model_and_report: Any) -> None:
    model, _ = model_and_report
    weights = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    assert set(weights) == set(parameters)
    for key, value in weights.items():
        assert np.array_equal(parameters[key].detach().numpy(), value), key


def test_matrices_are_normal_norms_one_and_biases_zero(folder: Path) -> None:
    for key, value in load_file(folder / "model.safetensors").items():
        if key.endswith(".bias"):
            assert not value.any(), key
        elif value.ndim == 1:
            assert (value == 1).all(), key
        else:
            assert abs(value.std() / MATRIX_STD - 1) < 5 / np.sqrt(2 * value.size), key
            assert abs(value.mean()) < 5 * MATRIX_STD / np.sqrt(value.size), key


def test_no_two_matrices_are_alike(folder: Path) -> None:
    starts = [tuple(value.ravel()[:4]) for value in load_file(folder / "model.safetensors").values() if value.ndim > 1]
    assert len(set(starts)) == len(starts) > 20


def test_a_forward_pass_over_an_image_prompt_gives_finite_logits(
    folder: Path, model_and_report: Any, tokenizer: Any
) -> None:
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor

    model, _ = model_and_report
    processors: Any = AutoImageProcessor
    picture = processors.from_pretrained(folder)(Image.new("RGB", (56, 56), (90, 120, 200)))
    assert np.asarray(picture["image_grid_thw"]).tolist() == [[1, 4, 4]]
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * 4))["input_ids"]])
    kinds = (ids == model.config.image_token_id).int()
    assert kinds.sum() == 4
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            mm_token_type_ids=kinds,
            pixel_values=torch.tensor(np.asarray(picture["pixel_values"])),
            image_grid_thw=torch.tensor([[1, 4, 4]]),
            use_cache=False,
        ).logits
    assert logits.shape == (1, ids.shape[1], len(tokenizer))
    assert torch.isfinite(logits).all()


def test_the_chat_template_puts_an_image_between_its_marks(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>which digit is this<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_chat_template_takes_videos_plain_texts_and_several_turns(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "video"}, {"type": "image"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "No."},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>"
        "<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\nNo.<|im_end|>\n"
    )


def test_transformers_and_tokenizers_agree_on_every_text_and_lose_nothing(folder: Path, tokenizer: Any) -> None:
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = plain.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert plain.decode(ids, skip_special_tokens=False) == text


def test_every_id_has_a_token_and_the_special_ones_come_last(name: str, folder: Path, tokenizer: Any) -> None:
    vocab = PRESETS[name].vocab
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert plain.get_vocab_size() == len(tokenizer) == vocab
    assert all(plain.id_to_token(i) for i in range(vocab))
    assert tuple(plain.id_to_token(i) for i in range(vocab - len(SPECIAL_TOKENS), vocab)) == SPECIAL_TOKENS


def test_the_ids_of_the_configuration_are_those_of_the_tokenizer(folder: Path, tokenizer: Any) -> None:
    shape = read_shape(folder)
    ids = tokenizer.convert_tokens_to_ids
    assert shape.image_id == ids("<|image_pad|>")
    assert shape.video_id == ids("<|video_pad|>")
    assert shape.vision_start_id == ids("<|vision_start|>")
    assert shape.vision_end_id == ids("<|vision_end|>")
    assert shape.eos_ids == (ids("<|im_end|>"),)
    assert shape.pad_id == tokenizer.pad_token_id == ids("<|endoftext|>")
    assert tokenizer.eos_token_id == ids("<|im_end|>")
    assert set(media_ids(shape)) == {
        ids(f"<|{kind}|>")
        for kind in ("image_pad", "video_pad", "vision_start", "vision_end", "vision_pad", "endoftext")
    }


def test_the_gpu_preset_has_sizes_that_sglang_and_tensor_parallelism_take(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shape = read_shape(write_preset("tiny-gpu", tmp_path_factory.mktemp("gpu")))
    assert shape.head_dim == 64
    assert shape.heads >= 4
    assert shape.kv_heads >= 2
    assert sum(shape.mrope_section) == shape.head_dim // 2
    assert shape.mrope_section == (8, 12, 12)
    vision = shape.vision
    widths = (shape.hidden, shape.intermediate, shape.vocab, vision.hidden, vision.intermediate, vision.out_hidden)
    assert [width % 64 for width in widths] == [0] * 6
    assert vision.head_dim in (32, 64)
    assert vision.heads % 2 == 0
    assert TINY_GPU.num_parameters < 3_000_000


def test_a_seed_gives_the_same_bytes_again_and_another_seed_other_weights_only(name: str, tmp_path: Path) -> None:
    first, again, other = (write_preset(name, tmp_path / x, seed=s) for x, s in (("a", 1), ("b", 1), ("c", 2)))
    for file in first.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
        assert ((other / file.name).read_bytes() == file.read_bytes()) == (file.name != "model.safetensors")
    mine, theirs = load_file(first / "model.safetensors"), load_file(other / "model.safetensors")
    matrices = [key for key in mine if mine[key].ndim > 1]
    assert not any(np.array_equal(mine[key], theirs[key]) for key in matrices)


def test_writing_over_a_folder_replaces_its_files(tmp_path: Path) -> None:
    write_preset("tiny-gpu", tmp_path)
    write_preset("tiny", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 64


def test_the_3b_shape_is_the_published_one(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(QWEN_3B.words)  # its ids fit too, and are there sooner
    (tmp_path / "config.json").write_text(json.dumps(model_config(QWEN_3B, token_ids(tokenizer))))
    shape = read_shape(tmp_path)
    table = parameter_table(shape, dtype=QWEN_3B.dtype, freeze_vision=False)
    assert sum(prod(piece.hf_shape) for piece in pieces(table)) == QWEN_3B.num_parameters
    assert (shape.head_dim, shape.mrope_section, shape.rope_theta, shape.tied) == (128, (16, 24, 24), 1e6, True)
    assert (shape.vision.head_dim, shape.vision.full_attention_blocks) == (80, (7, 15, 23, 31))
    assert table.total_bytes > 7.5e9


def test_a_vocabulary_larger_than_the_page_gives_words_for_has_a_token_for_every_id() -> None:
    tokenizer = build_tokenizer(151_936, 512)
    assert tokenizer.get_vocab_size() == 151_936
    ids = token_ids(tokenizer)
    assert ids.video == 151_935
    assert tokenizer.decode([498, 151_921]) == " w498 w151921"
    assert tokenizer.encode(" w498").ids == build_tokenizer(512).encode(" w498").ids
    assert all(tokenizer.id_to_token(number) for number in range(0, 151_936, 97))


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(SHRUNK, tmp_path_factory.mktemp("shrunk"), seed=1, shard_bytes=700_000)


def test_a_preset_in_bfloat16_is_written_in_several_files_that_transformers_opens(shrunk: Path) -> None:
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    assert len(list(shrunk.glob("model-*.safetensors"))) > 2
    models: Any = Qwen2_5_VLForConditionalGeneration
    model, report = models.from_pretrained(shrunk, output_loading_info=True, dtype=torch.bfloat16)
    assert not any(report.values()), report
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[1, 2, 3, 700]]), use_cache=False).logits.float()
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.05


def test_a_preset_in_bfloat16_has_normal_matrices_norms_of_one_and_the_same_bytes_again(
    shrunk: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file as load_tensors

    again = write_model(SHRUNK, tmp_path, seed=1, shard_bytes=700_000)
    table = parameter_table(read_shape(shrunk), dtype="bfloat16", freeze_vision=False)
    found = 0
    for file in placed(table, shrunk):
        assert (again / file.name).read_bytes() == file.read_bytes()
        for name, value in load_tensors(file).items():
            found += value.numel()
            assert value.dtype == torch.bfloat16
            if value.dim() == 1:
                assert (value == (0 if name.endswith(".bias") else 1)).all(), name
            else:
                assert abs(float(value.double().std()) / 0.02 - 1) < 5 / (2 * value.numel()) ** 0.5 + 0.002, name
    assert found == sum(prod(piece.hf_shape) for piece in pieces(table))


def test_a_folder_of_one_file_takes_the_place_of_one_of_several(tmp_path: Path) -> None:
    write_model(SHRUNK, tmp_path, shard_bytes=700_000)
    write_preset("tiny", tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_presets_are_found_by_name() -> None:
    assert preset_named("qwen2.5-vl-3b") is QWEN_3B


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny or tiny-wide or tiny-gpu or small or qwen"):
        write_preset("huge", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_module_writes_a_preset_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", str(tmp_path / "m"), "3"]) == 0
    assert (tmp_path / "m/model.safetensors").is_file()
    assert main(["huge", str(tmp_path / "n")]) == 2
    assert "error: There is no such preset" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err
