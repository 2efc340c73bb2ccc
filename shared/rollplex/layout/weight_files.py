"""Which tensors the weight files of a model folder hold, from the headers of the files alone.

Owns: finding the files (one, or shards and their index), the names that published checkpoints and transformers 5 give
to a parameter, and whether the tensors are those of a parameter table. Does not know: their numbers, tensors in memory.

Names. A folder holds those of the published checkpoints ("model.layers.0…", "visual…"), which save_pretrained writes,
or transformers' own parameter names ("model.language_model.layers.0…", "model.visual…").

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the numbers. Pickled weights are
never opened: reading one can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

from rollplex.errors import ModelError
from rollplex.layout.fields import load
from rollplex.layout.parameters import ParameterTable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LM_HEAD = "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the dtypes that a parameter may have in a folder; it is converted to the table's."""
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
NAMED = 5
"""So many missing tensors are named."""


class FileTensor(NamedTuple):
    """One tensor as a file's header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name."""
    file: Path

    @property
    def where(self) -> str:
        return f"{self.file}: {self.name}"


def placed(table: ParameterTable, folder: Path) -> dict[Path, dict[str, str]]:
    """Of each weight file the tensors that `table` has a place for: name in the file -> transformers' parameter.

    Args:
        table: all parameters of the model, or some of them (`header_bytes` 0): then others in the files are left out.

    Raises:
        ModelError: names the tensor that is missing, unknown, of another shape, not a float or there twice, or the file
            that cannot be read.
    """
    wanted = {piece.hf_name: piece.hf_shape for entry in table.entries for piece in entry.pieces}
    missing = dict.fromkeys(wanted)
    found: dict[Path, dict[str, str]] = {}
    for tensor in stored_tensors(folder):
        parameter = canonical_name(tensor.name)
        shape = wanted.get(parameter)
        if shape is None:
            _check_unneeded(parameter, table, tensor)
            continue
        if tensor.shape != shape:
            raise ModelError(
                "a tensor has another shape", got=str(list(tensor.shape)), needed=str(list(shape)), where=tensor.where
            )
        if tensor.dtype not in FLOATS:
            raise ModelError("a tensor is not a float", got=tensor.dtype, needed=", ".join(FLOATS), where=tensor.where)
        if parameter not in missing:
            raise ModelError("a tensor is there twice", got=parameter, needed="one of each", where=tensor.where)
        del missing[parameter]
        found.setdefault(tensor.file, {})[tensor.name] = parameter
    if missing:
        raise _missing(list(missing), folder)
    return found


def stored_tensors(folder: Path) -> Iterator[FileTensor]:
    """Every tensor, file by file in order of name.

    Raises:
        ModelError: the folder has no weights that are read here, a malformed index, or a damaged file.
    """
    for file in weight_files(folder):
        for name, entry in sorted(_header(file).items()):
            yield _tensor(name, entry, file)


def weight_files(folder: Path) -> list[Path]:
    """The one file, or the shards that the index names, in order of name. Raises ModelError."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    listed = load(folder / INDEX).get("weight_map")
    names = {str(name) for name in listed.values()} if isinstance(listed, dict) else set[str]()
    if not names or any(Path(name).name != name for name in names):
        raise ModelError("the index of shards is malformed", needed="plain file names", where=str(folder / INDEX))
    return [folder / name for name in sorted(names)]


def canonical_name(name: str) -> str:
    """transformers' parameter name of a tensor in a folder.

    The mapping is that of the published checkpoints (transformers/conversion_mapping.py, qwen2_5_vl and qwen2_vl).
    """
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def _header(file: Path) -> dict[str, object]:
    """Name to description. Checks that the file is as long as its tensors need it to be."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(length) if length <= MAX_HEADER_BYTES else b""
        content = json.loads(text)
        size_bytes = file.stat().st_size
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(file, "a header that is no object")
    content.pop("__metadata__", None)
    ends = [_end(entry) for entry in content.values()]
    if size_bytes != 8 + length + max(ends, default=0):
        raise _damaged(file, f"{size_bytes:,} bytes, of {8 + length + max(ends, default=0):,}")
    return cast("dict[str, object]", content)


def _end(entry: object) -> int:
    """Where a tensor's bytes end; -1: its description has another form, which `_tensor` refuses."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    whole = isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)
    return cast("list[int]", offsets)[1] if whole else -1


def _tensor(name: str, entry: object, file: Path) -> FileTensor:
    values = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
    shape, dtype = values.get("shape"), values.get("dtype")
    if not isinstance(shape, list) or not all(type(n) is int for n in shape) or not isinstance(dtype, str):
        raise _damaged(file, f"a description of {name} without shape and dtype")
    return FileTensor(name, tuple(shape), dtype, file)


def _damaged(file: Path, got: str) -> ModelError:
    return ModelError(
        "a weight file cannot be read",
        got=got,
        needed="a whole safetensors file",
        do="Copy or download it again.",
        where=str(file),
    )


def _no_weights(folder: Path) -> ModelError:
    others = sorted(file.name for file in folder.iterdir() if file.name.endswith(OTHER_FORMATS))
    return ModelError(
        "the folder has no weights that are read",
        got=", ".join(others[:NAMED]) or "no weight file",
        needed=f"{SINGLE}, or shards with {INDEX}",
        do="Convert them once, if you trust the file, for reading pickled weights can run code: "
        "from_pretrained(folder), then save_pretrained(another folder)."
        if others
        else "Download the safetensors files of the model too.",
        where=str(folder),
    )


def _check_unneeded(parameter: str, table: ParameterTable, tensor: FileTensor) -> None:
    """A tensor without a place is an error, unless it is a tied copy or this table has only some of the parameters."""
    tied = any(entry.tied for entry in table.entries)
    partial = table.header_bytes == 0
    if not (partial or (tied and parameter == LM_HEAD)):
        raise ModelError(
            "a tensor has no place in this architecture",
            got=parameter,
            needed="the parameters that config.json describes, and no others",
            where=tensor.where,
        )


def _missing(names: list[str], folder: Path) -> ModelError:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ModelError(
        "a tensor is missing",
        got=f"{len(names)} missing",
        needed=", ".join(sorted(names)[:NAMED]) + more,
        do="If the embedding is the output layer too, set tie_word_embeddings to true in config.json."
        if names == [LM_HEAD]
        else "",
        where=str(folder),
    )
