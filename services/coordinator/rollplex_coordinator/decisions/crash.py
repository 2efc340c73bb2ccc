"""What a journal says about weights that outlived a crash. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rollplex.errors import StateError
from rollplex.journal.events import Event, UpdateBegin, UpdateCommitted


def after_crash(journal_tail: Iterable[Event]) -> Literal["clean", "poisoned"]:
    """Whether weights that were found after a crash may be served.

    Args:
        journal_tail: the journal's last events, oldest first, from any point at or before the last BEGIN.

    Raises:
        StateError: BEGIN and COMMIT do not pair; the journal is not one that this gate led.
    """
    begun: UpdateBegin | None = None
    for event in journal_tail:
        match event:
            case UpdateBegin():
                begun = event
            case UpdateCommitted() if begun is not None:
                if (event.step, event.version) != (begun.step, begun.version + 1):
                    raise StateError(
                        "The journal has a COMMIT that does not belong to its BEGIN",
                        got=f"COMMIT of version {event.version} in step {event.step}",
                        needed=f"version {begun.version + 1} in step {begun.step}",
                    )
                begun = None
            case _:
                pass
    return "clean" if begun is None else "poisoned"
