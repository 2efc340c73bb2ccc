"""The optimizer's state as a file: safetensors with names `<kind>.<stored name>`, and `step`.

Owns the form, and the check that a file fits. Knows nothing of weights or checkpoint folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollplex.errors import CheckpointError
from rollplex.layout.optimizer import OptimizerTable
from rollplex.layout.parallel.plan import Parameter
from rollplex.layout.parallel.slices import slice_of
from rollplex.memory.tensors import DTYPES, OptimizerViews
from rollplex.model.parallel.weights import along
from rollplex.model.tensor_file import DTYPE_NAMES, Form, write_each

STATE_FILE = "optimizer.safetensors"
STEP: Final = "step"
_KIND = "optimizer"
"""Key of the file's metadata: which optimizer."""


def metadata(optimizer: str) -> dict[str, str]:
    """Of the file."""
    return {_KIND: optimizer}


def forms_of(table: OptimizerTable) -> dict[str, Form]:
    """Every tensor of the file. table: of the whole model."""
    dtype = DTYPES[table.dtype]
    states = {f"{state.kind}.{state.parameter}": Form(shape=state.shape, dtype=dtype) for state in table.states}
    return {**states, STEP: Form(shape=(), dtype=torch.int64)}


def write_state(file: Path, state: OptimizerViews, *, optimizer: str) -> None:
    """Write the state as it lies in the segment."""
    write_each(file, _named(state), metadata=metadata(optimizer))


def read_state(file: Path, state: OptimizerViews, *, optimizer: str) -> None:
    """Fill the segment from a file.

    Raises:
        CheckpointError: unreadable, of another optimizer, or a tensor that is missing, surplus, or of another form.
    """
    wanted = _named(state)

    def fill(opened: Any) -> None:
        for name, target in wanted.items():
            target.copy_(opened.get_tensor(name))

    _read(file, optimizer, {n: Form(shape=tuple(v.shape), dtype=v.dtype) for n, v in wanted.items()}, fill)


def read_rank_state(file: Path, table: OptimizerTable, parameters: Iterable[Parameter], state: OptimizerViews) -> None:
    """Fill one rank's segment with its shards.

    Args:
        table: of the whole model.
        parameters: what the rank trains (`DevicePlan.training`, frozen ones left out).
        state: by the names of these.

    Raises:
        CheckpointError: as `read_state`.
    """

    def fill(opened: Any) -> None:
        for parameter in parameters:
            cut = slice_of(parameter)
            for kind, tensors in state.states.items():
                whole = opened.get_slice(f"{kind}.{cut.entry}")
                tensors[parameter.name].copy_(along(whole, cut.axis, cut.stored))
        state.step.copy_(opened.get_tensor(STEP))

    _read(file, table.name, forms_of(table), fill)


def _read(file: Path, optimizer: str, forms: Mapping[str, Form], fill: Callable[[Any], None]) -> None:
    """Opens a file, compares it with `forms`, and fills from it."""
    try:
        with safe_open(file, framework="pt") as opened:
            found = (opened.metadata() or {}).get(_KIND)
            if found != optimizer:
                raise _unfit(file, f"state of {found}", f"state of {optimizer}")
            if different := sorted(set(opened.keys()) ^ set(forms)):
                raise _unfit(file, f"tensors that are only here or only in this run: {different[:5]}", "the same ones")
            for name, form in forms.items():
                whole = opened.get_slice(name)
                if (tuple(whole.get_shape()), whole.get_dtype()) != (form.shape, DTYPE_NAMES[form.dtype]):
                    got = f"{name}: {whole.get_shape()} {whole.get_dtype()}"
                    raise _unfit(file, got, f"{list(form.shape)} {DTYPE_NAMES[form.dtype]}")
            fill(opened)
    except (SafetensorError, OSError) as error:
        raise _unfit(file, f"{type(error).__name__}: {error}", "a whole file") from error


def _named(state: OptimizerViews) -> dict[str, Tensor]:
    tensors = {f"{kind}.{name}": value for kind, values in state.states.items() for name, value in values.items()}
    return {**tensors, STEP: state.step}


def _unfit(file: Path, got: str, needed: str) -> CheckpointError:
    return CheckpointError(
        "The optimizer's state does not fit this run", got=got, needed=needed, do="Use another one.", where=str(file)
    )
