"""Weights into the stored layout and back, bit for bit, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rollplex.errors import CheckpointError, ModelError
from rollplex.layout.parameters import parameter_table, reference_table
from rollplex.layout.shape import read_shape
from rollplex.layout.weight_files import canonical_name
from rollplex.memory.tensors import DTYPES, hf_views
from rollplex.model import weights


def filled(folder: Path, dtype: str = "float32") -> tuple[Any, dict[str, Tensor]]:
    table = parameter_table(read_shape(folder), dtype=dtype, freeze_vision=False)
    views = {e.name: torch.full(e.shape, float("nan"), dtype=DTYPES[dtype]) for e in table.entries}
    weights.fill(table, views, folder)
    return table, views


def opened(folder: Path) -> dict[str, Tensor]:
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    return dict(model.state_dict())


@pytest.fixture
def copy(kit: Any, tmp_path: Path) -> Any:
    """A copy of a model folder that may be changed."""

    def make(name: str = "gpu", *, tied: bool = False) -> Path:
        return Path(shutil.copytree(kit.folder(name, tied), tmp_path / "source"))

    return make


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"), [("gpu", "float32"), ("gpu", "bfloat16"), ("gpu", "float64"), ("qwen2", "bfloat16")]
)
def test_a_saved_folder_opens_and_holds_the_same_bits(
    kit: Any, tmp_path: Path, name: str, tied: bool, dtype: str
) -> None:
    source = kit.folder(name, tied)
    table, views = filled(source, dtype)
    size_bytes = weights.save_folder(table, views, source, tmp_path)
    assert size_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    again_table, again = filled(tmp_path, dtype)
    assert again_table == table
    assert all(torch.equal(again[stored], view) for stored, view in views.items())
    expected = opened(source)
    got = opened(tmp_path)
    assert got.keys() == expected.keys()
    for parameter, tensor in got.items():
        assert tensor.dtype == DTYPES[dtype]
        assert torch.equal(tensor, expected[parameter].to(DTYPES[dtype]))


def test_every_byte_of_the_stored_layout_is_written(kit: Any) -> None:
    _, views = filled(kit.folder("gpu", False))
    assert not any(view.isnan().any() for view in views.values())


def test_a_folder_with_transformers_parameter_names_is_read_and_written_under_them(copy: Any, tmp_path: Path) -> None:
    source = copy()
    file = source / "model.safetensors"
    _, expected = filled(source)
    names = {name: canonical_name(name) for name in load_file(file)}
    assert names["visual.merger.ln_q.weight"] == "model.visual.merger.ln_q.weight"
    assert names["model.norm.weight"] == "model.language_model.norm.weight"
    assert names["lm_head.weight"] == "lm_head.weight"
    save_file({names[n]: t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    table, views = filled(source)
    assert all(torch.equal(views[name], view) for name, view in expected.items())
    target = tmp_path / "target"
    target.mkdir()
    weights.save_folder(table, views, source, target)
    assert load_file(target / "model.safetensors").keys() == load_file(file).keys()
    assert opened(target).keys() == opened(source).keys()


def test_shards_are_read_and_written(copy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = copy()
    table, views = filled(source)
    target, second = tmp_path / "sharded", tmp_path / "single"
    target.mkdir()
    second.mkdir()
    monkeypatch.setattr(weights, "SHARD_BYTES", 1_000_000)
    weights.save_folder(table, views, source, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in target.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    _, again = filled(target)
    assert all(torch.equal(again[name], view) for name, view in views.items())
    expected = opened(source)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in opened(target).items())
    monkeypatch.undo()
    weights.save_folder(table, again, target, second)
    assert [file.name for file in second.glob("*.safetensors*")] == ["model.safetensors"]


def test_everything_but_weights_is_copied_and_the_dtype_is_the_tables(copy: Any, tmp_path: Path) -> None:
    source, target = copy(), tmp_path / "target"
    target.mkdir()
    (source / "tokenizer.json").write_text("{}")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["dtype"] = "float32"
    (source / "config.json").write_text(json.dumps(config))
    (source / "pytorch_model.bin").write_bytes(b"old")
    (source / "folder").mkdir()
    table, views = filled(source, "bfloat16")
    weights.save_folder(table, views, source, target)
    assert sorted(file.name for file in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    assert after.pop("dtype") == "bfloat16"
    assert before.pop("dtype") == "float32"
    assert after["text_config"].pop("dtype") == "bfloat16"
    before["text_config"].pop("dtype")
    assert after == before


def test_only_the_trainable_part_can_be_filled(kit: Any) -> None:
    folder = kit.folder("tiny", False)
    whole = parameter_table(read_shape(folder), dtype="float32", freeze_vision=True)
    part = reference_table(whole)
    views = {e.name: torch.empty(e.shape) for e in part.entries}
    weights.fill(part, views, folder)
    _, expected = filled(folder)
    assert views.keys() == {e.name for e in whole.entries if e.trainable}
    assert all(torch.equal(view, expected[name]) for name, view in views.items())


@pytest.mark.parametrize("on_disk", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_any_float_dtype_become_the_tables(
    copy: Any, on_disk: torch.dtype, shards: bool, dtype: str
) -> None:
    folder = copy(tied=True)
    file = folder / "model.safetensors"
    tensors = {name: tensor.to(on_disk) for name, tensor in load_file(file).items()}
    file.unlink()
    parts = [sorted(tensors)[0::2], sorted(tensors)[1::2]] if shards else [sorted(tensors)]
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts):
        name = f"model-{number + 1:05}-of-00002.safetensors" if shards else file.name
        save_file({tensor: tensors[tensor] for tensor in names}, folder / name)
        weight_map |= dict.fromkeys(names, name)
    if shards:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    table, views = filled(folder, dtype)
    held = hf_views(views, table)
    assert held.keys() == {canonical_name(name) for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(held[canonical_name(name)], tensor.to(DTYPES[dtype]))


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), "a tensor is missing; got 1 missing; needed model.language_model.norm.weight"),
        (lambda t: t.update({NORM: torch.zeros(3)}), rf"{NORM}: a tensor has another shape; got \[3\]"),
        (lambda t: t.update({NORM: torch.zeros(256, dtype=torch.int8)}), f"{NORM}: a tensor is not a float; got I8"),
        (lambda t: t.update({"model.extra": torch.zeros(3)}), "model.extra: a tensor has no place"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(copy: Any, edit: Any, message: str) -> None:
    folder = copy()
    change(folder, edit)
    with pytest.raises(ModelError, match=message):
        filled(folder)


def test_a_tied_copy_of_the_embedding_in_the_file_is_ignored(copy: Any) -> None:
    folder = copy(tied=True)
    _, expected = filled(folder)
    change(folder, lambda t: t.update({"lm_head.weight": torch.zeros(3)}))
    _, views = filled(folder)
    assert all(torch.equal(views[name], view) for name, view in expected.items())


def test_a_folder_without_usable_weights_is_refused(copy: Any) -> None:
    folder = copy()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model.safetensors: a weight file cannot be read"):
        filled(folder)
    file.unlink()
    with pytest.raises(ModelError, match="the folder has no weights"):
        filled(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(ModelError, match="index of shards is malformed"):
        filled(folder)


def test_a_target_that_cannot_be_written_is_a_checkpoint_error(kit: Any, tmp_path: Path) -> None:
    source = kit.folder("tiny", False)
    table, views = filled(source)
    with pytest.raises(CheckpointError, match="a checkpoint cannot be written"):
        weights.save_folder(table, views, source, tmp_path / "missing")
