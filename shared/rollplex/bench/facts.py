"""What the iterations of a bench are made of: prompts, tokens, fingerprints. Reads the data, before any node starts."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from statistics import fmean

from msgspec import Struct

from rollplex.config.config import Config
from rollplex.config.wire import data_sources
from rollplex.data.order import rows_of_step
from rollplex.data.source import open_source
from rollplex.data.tokenizer import TextTokenizer
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape


class Facts(Struct, frozen=True, kw_only=True):
    """Of the measured iterations; means are over their prompts."""

    prompts: int
    """Of one iteration."""
    group_size: int
    """Responses of a prompt; G."""
    prompt_tokens: float
    """Mean; P."""
    vision_tokens: float
    """Mean; those of P that stand for pictures or videos."""
    parameters: int
    """Numbers in the model."""
    reference: bool
    """Whether a reference model scores the responses."""


def read_facts(config: Config, *, first: int, end: int) -> tuple[Facts, str, str]:
    """Facts of the steps from `first` to before `end`, and the fingerprints of the data and of the model.

    Raises:
        DataError: a row that cannot be used.
        ModelError: a model that cannot be used.
        ConfigError: fewer rows than a step needs.
    """
    shape = read_shape(config.model.path)
    source = open_source(data_sources(config)[0], config.model.path, TextTokenizer(config.model.path))
    checked = source.check()
    good = checked.num_rows if checked.good_rows is None else checked.good_rows
    data = config.data
    steps = [
        rows_of_step(step, data.prompts_per_iteration, good, seed=config.run.seed, shuffle=data.shuffle)
        for step in range(first, end)
    ]
    sizes = {row: source.counted(row) for rows in steps for row in rows}
    table = parameter_table(shape, dtype=config.model.dtype, freeze_vision=config.model.freeze_vision)
    facts = Facts(
        prompts=data.prompts_per_iteration,
        group_size=config.rollout.group_size,
        prompt_tokens=fmean(sizes[row][0] for rows in steps for row in rows),
        vision_tokens=fmean(sizes[row][1] for rows in steps for row in rows),
        parameters=sum(math.prod(piece.hf_shape) for entry in table.entries for piece in entry.pieces),
        reference=config.needs_reference,
    )
    return facts, checked.fingerprint, model_fingerprint(config.model.path)


def model_fingerprint(folder: Path) -> str:
    """Of config.json, and of names and sizes of the weight files: reading all weights would take long."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()
