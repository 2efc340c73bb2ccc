"""What one call of a reward function is about: a group's row, its completions and how they ended.

Does not know in which form a function wants all this.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollplex.data.columns import ANSWER_PLACES, answer_in, columns_of
from rollplex.errors import RewardError


@dataclass(kw_only=True)
class Call:
    """One call for one group of G completions. Made anew for each function, so that none sees what another changed.

    Args:
        row: of the dataset, as it stands in the file.
        texts: [G] the decoded completions, without special tokens.
        ids: [G] their tokens, the stop token included.
        stopped: [G] whether a stop token ended it, else the length limit did.
        step: of training, from 0.
        source: the dataset's name.
        load_images: decodes the row's images.
    """

    row: Mapping[str, object]
    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    stopped: Sequence[bool]
    step: int
    source: str
    load_images: Callable[[], list[object]] = list
    sample: int | None = None
    """The completion that a function is being called for, if it is called for one at a time."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    """Numbers that the function reported itself, by name."""

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def columns(self) -> dict[str, object]:
        """What the row has beside its prompt."""
        return columns_of(self.row)

    @property
    def lengths(self) -> list[int]:
        """[G] tokens, the stop token included."""
        return [len(sample) for sample in self.ids]

    @property
    def finish_reasons(self) -> list[str]:
        """[G] "stop" or "length"."""
        return ["stop" if stopped else "length" for stopped in self.stopped]

    def ground_truth(self) -> object:
        """The right answer. Raises RewardError if the row has none."""
        return answer_of(self.row)

    def log_metric(self, name: str, value: object) -> None:
        """TRL's `log_metric`: report a number. What is no finite number is left out."""
        number = float(value) if isinstance(value, numbers.Real) else math.nan
        if math.isfinite(number):
            self.logged.setdefault(str(name), []).append(number)


def answer_of(row: Mapping[str, object]) -> object:
    """The right answer of a row.

    Raises:
        RewardError: it has none.
    """
    answer = answer_in(row)
    if answer is None:
        raise RewardError("The row has no right answer", got=f"columns {sorted(columns_of(row))}", needed=ANSWER_PLACES)
    return answer
