"""Events that are a moment in the run, in a few words: starts, stops, errors, deaths. Pure.

Also any event that is added to the journal later and has no mark of its own: it is shown by its type.
"""

from __future__ import annotations

import msgspec

from rollplex.journal import events
from rollplex.journal.events import Event
from rollplex.trace import marks
from rollplex.trace.marks import Args, Mark, Value

_NOT_SHOWN = {"type", "traceback"}


def moment(event: Event, at_ns: int) -> Mark:
    """A moment on the events' track, with what the event says as arguments."""
    return Mark(track=marks.EVENTS, name=headline(event), kind=type(event).__name__, start_ns=at_ns, args=_args(event))


def headline(event: Event) -> str:
    """What happened, short enough for a label."""
    match event:
        case events.RunStarted():
            text = f"run {event.run} {'goes on' if event.resumed else 'starts'}"
        case events.RunEnded():
            text = f"run ends, exit code {event.exit_code}"
        case events.StopRequested():
            text = f"stop asked for by {event.source}"
        case events.ErrorRaised():
            text = f"error: {event.error.kind}" + (f" in {event.service}" if event.service else "")
        case events.ServiceStarted():
            text = f"{event.service} started"
        case events.ServiceReady():
            text = f"{event.service} ready"
        case events.ServiceDied():
            text = f"{event.service} died: {event.how}"
        case events.WorkersRestarting():
            text = f"all workers start again after {event.service or 'MPS'}"
        case events.WorkersRestarted():
            text = "all workers are back"
        case events.ServiceSwapped():
            text = f"{event.role} replaced"
        case events.SwapRefused():
            text = f"{event.role} not replaced: {event.case}"
        case _:
            text = type(event).__name__
    return text


def _args(event: Event) -> Args:
    found: list[tuple[str, Value]] = []
    for name, value in msgspec.to_builtins(event).items():
        if isinstance(value, dict):
            found += [(f"{name}.{inner}", _plain(v)) for inner, v in value.items() if inner not in _NOT_SHOWN]
        elif name not in _NOT_SHOWN and value is not None:
            found.append((name, _plain(value)))
    return tuple((name, value) for name, value in found if value != "")


def _plain(value: object) -> Value:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return str(value)
    return value
