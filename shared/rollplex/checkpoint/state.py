"""What a checkpoint keeps of the run beside weights and optimizer state: training/state.json.

Owns the form. Knows nothing of who writes it or of what a difference means (`compare`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from rollplex.errors import CheckpointError

STATE_FILE = "training/state.json"
"""Inside a checkpoint folder."""
FORMAT = 1

Number = Annotated[int, Meta(ge=0)]


class RunState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run stood between two iterations.

    Nothing random is in it: every draw is a function of the seed and of what it is drawn for.
    """

    format: Annotated[int, Meta(ge=1)] = FORMAT
    step: Number
    """Iterations that are done; the number of the next one."""
    version: Number
    """Committed updates."""
    seed: Number
    wanted: Number = 0
    """Iterations that the run was to have at its end; 0: nobody had said."""
    failed_votes: Number = 0
    """Iterations in a row, up to here, whose update was refused."""
    table_hash: str
    """Of the parameter table."""
    config: str
    """The resolved configuration as YAML text."""
    fingerprints: dict[str, str]
    """Of what the configuration only names: data.<source>, model, rewards.<function>."""


def encode(state: RunState) -> str:
    """As JSON text."""
    return msgspec.json.encode(state, order="sorted").decode()


def read(folder: Path) -> RunState:
    """The state that a checkpoint folder keeps.

    Raises:
        CheckpointError: no such file, or not of this form.
    """
    file = folder / STATE_FILE
    try:
        state = msgspec.json.decode(file.read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(
            "The state of the run cannot be read from this checkpoint",
            got=f"{type(error).__name__}: {error}",
            do="Use a checkpoint that this version of Rollplex wrote.",
            where=str(file),
        ) from error
    if state.format != FORMAT:
        raise CheckpointError(
            "This checkpoint has another format", got=str(state.format), needed=str(FORMAT), where=str(file)
        )
    return state
