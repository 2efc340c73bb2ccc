"""Every error that Rollplex raises on purpose.

    RollplexError
    ├── ConfigError          a configuration that cannot run; found before anything starts
    ├── DataError            a dataset row, image or prompt that cannot be used; names the row
    ├── RewardError          the user's reward function raised, hung, or returned something unusable
    ├── BudgetError          memory asked for that the budget cannot give
    ├── SegmentError         a segment that cannot be made, sent, mapped or trusted
    ├── ProtocolError        a message that is malformed, unexpected, too large, or from the wrong peer
    ├── StaleWeightsError    weights of another version, in the middle of an update, or poisoned
    ├── ModelError           a model folder or architecture that cannot be loaded
    ├── EngineError          the rollout engine broke its contract
    │   └── DivergedError    the model's numbers are not finite any more
    ├── UpdateError          gradients or weights that may not be committed
    ├── CheckpointError      a checkpoint that cannot be written or read
    ├── JournalError         the journal cannot be opened, written or read
    ├── WaitError            a wait that reached its deadline; says for what, from whom, since when
    ├── ServiceDied          a service process ended while it was needed
    └── StateError           an event that a state machine does not allow; carries the recent story

An error says what happened, what it got, what it needed and what to do. It crosses process borders as
`rollplex.protocol.ErrorReport`, never as a pickle.
"""

from __future__ import annotations


class RollplexError(Exception):
    """Base of all errors. Every part but `what` may be empty.

    Args:
        what: what happened, a full sentence without the final dot.
        got: the offending value, as found.
        needed: the rule it broke.
        do: what the user can do about it.
        where: file, row, service, parameter: whatever lets the user find the place.
    """

    def __init__(self, what: str, *, got: str = "", needed: str = "", do: str = "", where: str = "") -> None:
        super().__init__(what, got, needed, do, where)
        self.what = what
        self.got = got
        self.needed = needed
        self.do = do
        self.where = where

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, (self.got, self.needed, self.do, self.where)))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.got:
            text += f"; got {self.got}"
        if self.needed:
            text += f"; needed {self.needed}"
        if self.do:
            text += f". {self.do}"
        return text


def _rebuild(kind: type[RollplexError], what: str, parts: tuple[str, str, str, str]) -> RollplexError:
    got, needed, do, where = parts
    return kind(what, got=got, needed=needed, do=do, where=where)


class ConfigError(RollplexError):
    """A configuration that cannot run."""


class DataError(RollplexError):
    """A dataset row, image or prompt that cannot be used."""


class RewardError(RollplexError):
    """A reward function raised, hung, or returned something unusable."""


class BudgetError(RollplexError):
    """Memory asked for that the budget cannot give."""


class SegmentError(RollplexError):
    """A segment that cannot be made, sent, mapped or trusted."""


class ProtocolError(RollplexError):
    """A message that is malformed, unexpected, too large, or from the wrong peer."""


class StaleWeightsError(RollplexError):
    """Weights of another version than asked for, in the middle of an update, or poisoned."""


class ModelError(RollplexError):
    """A model folder or architecture that cannot be loaded."""


class EngineError(RollplexError):
    """The rollout engine broke its contract."""


class DivergedError(EngineError):
    """The model's numbers are not finite any more."""


class UpdateError(RollplexError):
    """Gradients or weights that may not be committed."""


class CheckpointError(RollplexError):
    """A checkpoint that cannot be written or read."""


class JournalError(RollplexError):
    """The journal cannot be opened, written or read."""


class WaitError(RollplexError):
    """A wait that reached its deadline."""


class ServiceDied(RollplexError):  # noqa: N818 - it names what happened; "ServiceDiedError" says it twice
    """A service process ended while it was needed."""


class StateError(RollplexError):
    """An event that a state machine does not allow."""
