"""The event stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from rollplex_coordinator.http.deps import PartsDep
from rollplex_coordinator.http.errors import MalformedError
from rollplex_coordinator.http.streams import EventStream

router = APIRouter(tags=["events"])
MAX_ID = 2**63 - 1
MAX_LAST = 100_000


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def stream_events(
    parts: PartsDep,
    after: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    last: Annotated[int | None, Query(ge=0, le=MAX_LAST)] = None,
    follow: bool = True,
    last_event_id: Annotated[str | None, Header(max_length=32)] = None,
) -> EventStream:
    """Every event of the run as server-sent events. Ids are the journal's: the stream goes on after the header
    Last-Event-ID, or else after the id `after`, or else with the `last` so many. With follow=false it ends at the
    present."""
    if last_event_id:
        after, last = _id(last_event_id), None
    return EventStream(parts.streams, after=after, follow=follow, last=None if after else last)


def _id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= MAX_ID):
        raise MalformedError("Last-Event-ID is no event's id", got=text, needed="a whole number")
    return int(text)
