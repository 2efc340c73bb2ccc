"""What a model folder is asked before anything is started for it.

Owns: the order of the questions, and the refusal of folders that bring code of their own. Reads configurations and the
headers of weight files, which takes milliseconds whatever the size of the model. No torch.
"""

from __future__ import annotations

from pathlib import Path

from rollplex.errors import ModelError
from rollplex.layout.fields import load
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.layout.weight_files import placed

CODE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def check_folder(folder: Path) -> None:
    """Refuse a folder that no run could start from.

    Raises:
        ModelError: it wants its own code run, has another architecture, a field that cannot be used, weights in a
            format that is not read, or tensors that are not those that config.json describes. Names file and field, or
            file and tensor.
    """
    refuse_code(folder)
    placed(parameter_table(read_shape(folder), dtype="float32", freeze_vision=False), folder)


def refuse_code(folder: Path) -> None:
    """Raise ModelError if a file of the folder asks for the folder's own Python code (`auto_map`)."""
    for name in CODE_FILES:
        file = folder / name
        if file.is_file() and load(file).get("auto_map"):
            raise ModelError(
                "This model wants its own code run, which Rollplex never does",
                got="auto_map",
                needed="a model of transformers' own classes",
                do=f"Take auto_map out of {name} if the model is one of transformers' own.",
                where=str(file),
            )
