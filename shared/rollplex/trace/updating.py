"""One passage through the gate as marks.

update        ├ drain: gradients summed, vote, readers drained ┤ BEGIN to COMMIT ├ readers go on ┤
              with several devices inside                                 copies
trainer                                                          optimizer step
"""

from __future__ import annotations

from rollplex.journal import events
from rollplex.trace import marks
from rollplex.trace.arrows import Arrows
from rollplex.trace.marks import OPEN, Args, Mark, ns


class Updating:
    """What the journal has said of the present update."""

    def __init__(self) -> None:
        self._begun: tuple[events.UpdateBegin, int] | None = None
        self._committed: tuple[events.UpdateCommitted, int] | None = None
        self._skipped: events.UpdateSkipped | None = None

    def begin(self, event: events.UpdateBegin, at_ns: int) -> None:
        self._begun = (event, at_ns)

    def commit(self, event: events.UpdateCommitted, at_ns: int) -> None:
        self._committed = (event, at_ns)

    def skip(self, event: events.UpdateSkipped, _at_ns: int) -> None:
        self._skipped = event

    def marks(self, start_ns: int, end_ns: int, trainer: str, more: Args, arrows: Arrows) -> list[Mark]:
        """The phase is over: its marks, for the last time. `more`: arguments of what had not ended."""
        begun, committed, skipped = self._begun, self._committed, self._skipped
        self._begun = self._committed = self._skipped = None
        name = "update" if begun is None else f"update {begun[0].step}"
        reason: Args = () if skipped is None else (("skipped", skipped.reason),)
        update = _mark(name if skipped is None else "update skipped", "update", start_ns, end_ns, (*reason, *more))
        arrows.update = update
        found = [update]
        if begun is None:
            return found
        begun_ns = min(max(begun[1], start_ns), end_ns)
        found.append(_mark("drain", "drain", start_ns, begun_ns))
        if committed is None:
            poisoned = (("weights", "poisoned: no COMMIT after this BEGIN"), OPEN)
            found.append(_mark("BEGIN to COMMIT", "writing", begun_ns, end_ns, poisoned))
            return found
        event, at_ns = committed
        committed_ns = min(max(at_ns, begun_ns), end_ns)
        args = (("version", event.version), ("digest", event.digest))
        arrows.writing = _mark("BEGIN to COMMIT", "writing", begun_ns, committed_ns, args)
        arrows.optimizer = Mark(
            track=trainer,
            name=f"optimizer step {event.step}",
            kind="optimizer",
            start_ns=ns(event.start_s),
            end_ns=max(ns(event.start_s), ns(event.end_s)),
        )
        copies = _copies(event, committed_ns)
        reopen = _mark("readers go on", "reopen", committed_ns, end_ns)
        return [*found, arrows.writing, *copies, reopen, arrows.optimizer]


def _copies(event: events.UpdateCommitted, committed_ns: int) -> list[Mark]:
    """From the optimizer's end to the last copy, where there are several devices."""
    if event.published_s is None:
        return []
    args = (("refreshed bytes", event.refreshed_bytes), ("rebuilt bytes", event.rebuilt_bytes))
    start_ns = min(ns(event.end_s), committed_ns)
    end_ns = min(max(ns(event.published_s), start_ns), committed_ns)
    return [_mark("copies to other devices", "publish", start_ns, end_ns, args)]


def _mark(name: str, kind: str, start_ns: int, end_ns: int, args: Args = ()) -> Mark:
    return Mark(track=marks.UPDATES, name=name, kind=kind, start_ns=start_ns, end_ns=end_ns, args=args)
