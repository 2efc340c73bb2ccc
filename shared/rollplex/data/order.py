"""Which rows a step trains on. Pure: a function of the seed, the step and the good rows; there is no position to save.

Each epoch goes through the good rows in an order of its own (a Philox permutation of the epoch's number) and leaves out
the few that do not fill a step, other ones in every epoch; so no row stands twice in one step. Without shuffling, steps
go round the file and leave out nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollplex.errors import ConfigError

PURPOSE = 0x726F7773
""""rows": keeps these draws apart from all others of the same seed."""


def rows_of_step(
    step: int, num_prompts: int, good_rows: Sequence[int] | int, *, seed: int, shuffle: bool
) -> tuple[int, ...]:
    """The rows of one step, all different.

    Args:
        step: from 0.
        num_prompts: rows of every step.
        good_rows: the rows that may be used, ascending; a number n stands for 0 … n-1.
        seed: of the run.
        shuffle: whether each epoch has its own order.

    Raises:
        ConfigError: a step that needs more rows than there are.
    """
    total = good_rows if isinstance(good_rows, int) else len(good_rows)
    if not 0 < num_prompts <= total:
        raise ConfigError(
            "One step needs more rows than the dataset has",
            got=f"{num_prompts} prompts a step, {total} good rows",
            needed="at least one, and no row twice in a step",
            do="Lower data.prompts_per_iteration.",
        )
    if shuffle:
        epoch, index = divmod(step, total // num_prompts)
        chosen = permutation(total, seed, epoch)[index * num_prompts : (index + 1) * num_prompts].tolist()
    else:
        chosen = [(step * num_prompts + offset) % total for offset in range(num_prompts)]
    return tuple(chosen) if isinstance(good_rows, int) else tuple(good_rows[index] for index in chosen)


def epochs(steps: int, num_prompts: int, good_rows: Sequence[int] | int, *, shuffle: bool) -> float:
    """How many passes over the rows so many steps are: in shuffled order a pass leaves out what fills no step.

    Args: as `rows_of_step`, which must have accepted them.
    """
    total = good_rows if isinstance(good_rows, int) else len(good_rows)
    return steps / (total // num_prompts) if shuffle else steps * num_prompts / total


def permutation(total: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A permutation of 0 … total-1: the order of Philox' raw 64-bit words for (seed, epoch); equal words by index.

    Raw words are part of numpy's compatibility promise; `Generator.permutation` is not.
    """
    words = np.random.Philox(key=seed, counter=[0, 0, epoch, PURPOSE]).random_raw(total)
    return np.argsort(words, kind="stable").astype(np.int64)


def batches(good_rows: Sequence[int] | int, size: int, *, limit: int = 0) -> list[tuple[int, ...]]:
    """All good rows in file order, `size` at a time, the last batch perhaps shorter; for evaluations.

    Args:
        good_rows: as in `rows_of_step`.
        size: rows of a batch.
        limit: only the first so many; 0 is all.
    """
    rows = range(good_rows) if isinstance(good_rows, int) else good_rows
    end = min(limit, len(rows)) if limit else len(rows)
    return [tuple(rows[start : min(start + size, end)]) for start in range(0, end, size)]
