"""The optimizer's state as a file: safetensors with names `<kind>.<stored name>`, and `step`.

Owns the form, and the check that a file fits. Knows nothing of weights or checkpoint folders.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollplex.errors import CheckpointError
from rollplex.memory.tensors import OptimizerViews

STATE_FILE = "optimizer.safetensors"
_KIND = "optimizer"
"""Key of the file's metadata: which optimizer."""


def write_state(file: Path, state: OptimizerViews, *, optimizer: str) -> None:
    """Write the state as it lies in the segment."""
    save_file(_named(state), file, metadata={_KIND: optimizer})


def read_state(file: Path, state: OptimizerViews, *, optimizer: str) -> None:
    """Fill the segment from a file.

    Raises:
        CheckpointError: unreadable, of another optimizer, or a tensor that is missing, surplus, or of another form.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            found = (opened.metadata() or {}).get(_KIND)
            if found != optimizer:
                raise _unfit(file, f"state of {found}", f"state of {optimizer}")
            wanted = _named(state)
            if different := sorted(set(opened.keys()) ^ set(wanted)):
                raise _unfit(file, f"tensors that are only here or only in this run: {different[:5]}", "the same ones")
            for name, target in wanted.items():
                value = opened.get_tensor(name)
                if (value.shape, value.dtype) != (target.shape, target.dtype):
                    raise _unfit(
                        file,
                        f"{name}: {list(value.shape)} {value.dtype}",
                        f"{list(target.shape)} {target.dtype}",
                    )
                target.copy_(value)
    except (SafetensorError, OSError) as error:
        raise _unfit(file, f"{type(error).__name__}: {error}", "a whole file") from error


def _named(state: OptimizerViews) -> dict[str, Tensor]:
    tensors = {f"{kind}.{name}": value for kind, values in state.states.items() for name, value in values.items()}
    return {**tensors, "step": state.step}


def _unfit(file: Path, got: str, needed: str) -> CheckpointError:
    return CheckpointError(
        "The optimizer's state does not fit this run", got=got, needed=needed, do="Use another one.", where=str(file)
    )
