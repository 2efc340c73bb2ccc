"""Checkpoints and evaluations as marks: each is a phase; what was saved or evaluated is told by events within it."""

from __future__ import annotations

from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex.trace import marks
from rollplex.trace.marks import Args, Mark


class Saving:
    """What the journal has said of the present checkpoint or evaluation."""

    def __init__(self) -> None:
        self._name = ""
        self._args: Args = ()

    def eval_started(self, event: events.EvalStarted, _at_ns: int) -> None:
        self._name, self._args = f"evaluation {event.name}", (("rows", event.rows), ("version", event.version))

    def eval_done(self, event: events.EvalDone, _at_ns: int) -> None:
        metrics = tuple((name, value) for name, value in event.metrics.items() if value is not None)
        self._name, self._args = f"evaluation {event.name}", (*self._args, *metrics)

    def saved(self, event: events.CheckpointSaved, _at_ns: int) -> None:
        self._name = f"checkpoint of step {event.step}"
        self._args = (("version", event.version), ("folder", event.folder), ("bytes", event.size_bytes))

    def marks(self, phase: str, start_ns: int, end_ns: int, more: Args) -> list[Mark]:
        """The phase is over. `more`: arguments of what had not ended."""
        name, args = self._name, self._args
        self._name, self._args = "", ()
        kind = "checkpoint" if phase == Phase.CHECKPOINT.name else "evaluation"
        return [
            Mark(
                track=marks.SAVES,
                name=name or kind,
                kind=kind,
                start_ns=start_ns,
                end_ns=max(start_ns, end_ns),
                args=(*args, *more),
            )
        ]
