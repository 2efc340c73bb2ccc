"""Which tensors a folder holds, from the headers alone: names, forms, and every fault by its own name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rollplex.errors import ModelError
from rollplex.layout import folder as model_folder
from rollplex.layout import weight_files
from rollplex.layout.folder import check_folder
from rollplex.layout.parameters import parameter_table, reference_table
from rollplex.layout.shape import read_shape
from rollplex.layout.weight_files import canonical_name, placed, stored_tensors
from support.published import PUBLISHED

Tensors = dict[str, Any]
Edit = Callable[[Tensors], object]
NORM = "model.norm.weight"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def published_name(parameter: str) -> str:
    """Of one of transformers' parameters, as published checkpoints have it."""
    return parameter.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def write_weights(folder: Path, *, dtype: Any = np.float32, shards: int = 1) -> dict[str, str]:
    """Zeros in place of every parameter; returns the weight map."""
    table = parameter_table(read_shape(folder), dtype="float32", freeze_vision=False)
    pieces = [piece for entry in table.entries for piece in entry.pieces]
    files: dict[str, Tensors] = {}
    for number, piece in enumerate(pieces):
        name = FILE if shards == 1 else f"model-{number % shards + 1:05}-of-{shards:05}.safetensors"
        files.setdefault(name, {})[published_name(piece.hf_name)] = np.zeros(piece.hf_shape, dtype)
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return weight_map


@pytest.fixture
def complete(tiny: dict[str, Any], folder: Callable[..., Path]) -> Path:
    """A folder that a run could start from."""
    path = folder(tiny)
    write_weights(path)
    return path


def edit(folder: Path, change: Edit, file: str = FILE) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def renamed(tensors: Tensors) -> None:
    """As transformers 5 names its parameters."""
    for name in list(tensors):
        tensors[canonical_name(name)] = tensors.pop(name)


@pytest.mark.parametrize("architecture", ["Qwen2.5-VL-3B", "Qwen2-VL-2B"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("change", [lambda tensors: None, renamed], ids=["published", "transformers 5"])
def test_every_form_of_a_complete_folder_is_accepted(
    tiny: dict[str, Any], folder: Callable[..., Path], architecture: str, shards: int, dtype: Any, change: Edit
) -> None:
    if architecture == "Qwen2-VL-2B":
        tiny["model_type"] = "qwen2_vl"
        tiny["vision_config"] = {"depth": 2, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2}
    path = folder(tiny)
    for file in set(write_weights(path, dtype=dtype, shards=shards).values()):
        edit(path, change, file)
    check_folder(path)
    table = parameter_table(read_shape(path), dtype="float32", freeze_vision=False)
    found = placed(table, path)
    assert len(found) == shards
    parameters = [parameter for names in found.values() for parameter in names.values()]
    assert sorted(parameters) == sorted(piece.hf_name for entry in table.entries for piece in entry.pieces)


def test_names_of_published_checkpoints_are_transformers_parameters() -> None:
    names = {
        "visual.merger.ln_q.weight": "model.visual.merger.ln_q.weight",
        "model.norm.weight": "model.language_model.norm.weight",
        "model.embed_tokens.weight": "model.language_model.embed_tokens.weight",
        "model.visual.merger.ln_q.weight": "model.visual.merger.ln_q.weight",
        "model.language_model.norm.weight": "model.language_model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert {name: canonical_name(name) for name in names} == names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), "a tensor is missing; got 1 missing; needed model.language_model.norm.weight"),
        (
            lambda t: [t.pop(name) for name in list(t) if "layers.1." in name],
            "got 12 missing; needed model.language_model.layers.1.input_layernorm.weight, .*, and 7 more",
        ),
        (lambda t: t.pop("lm_head.weight"), "needed lm_head.weight.*set tie_word_embeddings to true"),
        (lambda t: t.update({NORM: np.zeros(3)}), rf"{FILE}: {NORM}: a tensor has another shape; got \[3\]; .*\[48\]"),
        (lambda t: t.update({NORM: np.zeros((48, 1))}), r"got \[48, 1\]; needed \[48\]"),
        (lambda t: t.update({NORM: np.zeros(48, np.int8)}), f"{NORM}: a tensor is not a float; got I8"),
        (lambda t: t.update({"model.extra": np.zeros(3)}), f"{FILE}: model.extra: a tensor has no place"),
        (lambda t: t.update({canonical_name(NORM): t[NORM]}), "a tensor is there twice; got model.language_model.norm"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(complete: Path, change: Edit, message: str) -> None:
    edit(complete, change)
    with pytest.raises(ModelError, match=message):
        check_folder(complete)


def test_a_tied_copy_of_the_embedding_needs_no_place(tiny: dict[str, Any], folder: Callable[..., Path]) -> None:
    path = folder(tiny)
    write_weights(path)
    folder({**tiny, "tie_word_embeddings": True})
    check_folder(path)
    edit(path, lambda t: t.pop("lm_head.weight"))
    check_folder(path)


def test_a_table_of_some_parameters_leaves_the_others_out(complete: Path) -> None:
    frozen = parameter_table(read_shape(complete), dtype="float32", freeze_vision=True)
    ((_, names),) = placed(reference_table(frozen), complete).items()
    assert names
    assert not any("visual" in name for name in names)


def cut(file: Path, size_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:size_bytes])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: cut(f, f.stat().st_size - 1), r"bytes, of .*; needed a whole safetensors file.*again"),
        (lambda f: f.write_bytes(f.read_bytes() + b"x"), "bytes, of"),
        (lambda f: cut(f, 500), "a weight file cannot be read"),
        (lambda f: cut(f, 0), "a weight file cannot be read"),
        (lambda f: f.write_bytes(b"\xff" * 64), "a weight file cannot be read"),
        (lambda f: f.write_bytes((2).to_bytes(8, "little") + b"[]"), "a header that is no object"),
        (lambda f: f.write_bytes((7).to_bytes(8, "little") + b'{"a":1}'), "cannot be read"),
        (lambda f: f.write_bytes((8).to_bytes(8, "little") + b'{"a":{}}'), "cannot be read"),
        (lambda f: f.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "cannot be read"),
        (lambda f: (f.unlink(), f.mkdir()), "no weights that are read; got no weight file"),
    ],
)
def test_a_damaged_file_is_named(complete: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(complete / FILE)
    with pytest.raises(ModelError, match=message) as caught:
        check_folder(complete)
    assert str(complete) in caught.value.where


def test_a_shard_that_is_not_there_is_named(tiny: dict[str, Any], folder: Callable[..., Path]) -> None:
    path = folder(tiny)
    write_weights(path, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors: a weight file cannot be read"):
        check_folder(path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_an_index_that_names_no_file_of_the_folder_is_refused(complete: Path, index: str) -> None:
    (complete / FILE).unlink()
    (complete / INDEX).write_text(index)
    with pytest.raises(ModelError, match="the index of shards is malformed"):
        check_folder(complete)


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickled_weights_are_refused_unopened_with_what_to_do(complete: Path, name: str) -> None:
    import pickle

    mark = complete / "ran"
    (complete / FILE).unlink()
    (complete / name).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ModelError, match=rf"got {name}; needed {FILE}, or shards.*save_pretrained"):
        check_folder(complete)
    assert not mark.exists()
    pickle.loads((complete / name).read_bytes())  # noqa: S301 - that it would have run is the point
    assert mark.exists(), "the trap works"


@pytest.mark.parametrize("name", model_folder.CODE_FILES)
def test_a_folder_with_code_of_its_own_is_refused_and_the_code_never_run(complete: Path, name: str) -> None:
    mark = complete / "ran"
    file = complete / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}))
    (complete / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    with pytest.raises(ModelError, match="wants its own code run, which Rollplex never does; got auto_map") as caught:
        check_folder(complete)
    assert caught.value.where == str(file)
    assert not mark.exists()


def test_a_folder_of_another_architecture_is_refused_before_its_weights_are_looked_for(
    folder: Callable[..., Path],
) -> None:
    with pytest.raises(ModelError, match="needed qwen2_5_vl or qwen2_vl"):
        check_folder(folder({**PUBLISHED["Qwen2.5-VL-7B"].config, "model_type": "qwen3_vl"}))


def test_a_header_longer_than_any_is_not_read(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ModelError, match="cannot be read"):
        list(stored_tensors(complete))
