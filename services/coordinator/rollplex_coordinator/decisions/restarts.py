"""Whether the workers start again as a group after one of them ended, and how often. Pure.

    end of a worker ─► worth it? weights whole? any left? ─► pause ─► all end, all start, all load ─► the work again
                          └── no: the run ends by it                       └── an end again: the same question

Under MPS a fault of one takes all clients of the GPU with it, and one that is killed in the middle of a kernel leaves
the others undefined; so all workers start again, whoever it was, on hosts too.

Owns the count, the pause, and which ends are worth another try. Knows nothing of processes, clocks or messages.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from rollplex.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    JournalError,
    ModelError,
    ProtocolError,
    RewardError,
    SegmentError,
    StaleWeightsError,
    StateError,
    UpdateError,
)
from rollplex.protocol.common import Role
from rollplex_coordinator.decisions.fleet import WORKERS
from rollplex_coordinator.decisions.gpu_fault import is_gpu_fault

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_LASTING = frozenset(
    kind.__name__
    for kind in (
        BudgetError,
        CheckpointError,
        ConfigError,
        DataError,
        DivergedError,
        JournalError,
        ModelError,
        ProtocolError,
        RewardError,
        SegmentError,
        StaleWeightsError,
        StateError,
        UpdateError,
    )
)
"""What a new process would say again, or what says that a rule is broken: nothing to try again."""


class End(Struct, frozen=True, kw_only=True):
    """How a process of the node came to its end, or is as good as ended."""

    role: Role | None
    """None: no process of a role, but what the workers use the GPU through."""
    kind: str
    """Of the error, its own name."""
    text: str


class Restart(Struct, frozen=True, kw_only=True):
    """One of them, as status shows it."""

    number: int
    service: str
    """Whose end it followed."""
    how: str
    phase: str
    step: int | None
    wall_s: float
    done: bool = False


class Restarts:
    """Those of one run.

    Args:
        allowed: so many in the whole run; 0: none.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.made = 0
        self.newest: Restart | None = None
        self._in_a_row = 0

    @property
    def left(self) -> bool:
        """Another one may be made."""
        return self.made < self.allowed

    def not_worth(self, end: End, *, whole: bool) -> str:
        """Why the workers do not start again after this, whatever is left; empty: they may.

        Args:
            whole: the weights are, as the gate says.
        """
        if not self.allowed:
            return "run.restarts is 0"
        if end.role is not None and end.role not in WORKERS:
            return f"{end.role} is no worker"
        if end.kind in _LASTING and not is_gpu_fault(end.text):
            return f"{end.kind} is not an end that another start mends"
        if not whole:
            return "an update of the weights had begun and was not committed"
        return ""

    def begin(self) -> float:
        """One more. Returns the seconds to wait before it: none before the first since the work last got on."""
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._in_a_row - 1)) if self._in_a_row else 0.0
        self.made += 1
        self._in_a_row += 1
        return pause_s

    def done(self) -> None:
        """The workers are back."""
        assert self.newest is not None, "it was begun"
        self.newest = replace(self.newest, done=True)

    def progressed(self) -> None:
        """A piece of the work is done."""
        self._in_a_row = 0
