"""When a unit counts as prefilled, over streams of chunks without SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from rollplex_rollout.sglang.requests import Request
from rollplex_rollout.sglang.streams import Done, Finished, Inbox, Prefilled, Streams


def requests(groups: int, samples: int) -> list[list[Request]]:
    made: list[Any] = [[Fake(f"{group}-{sample}", 2) for sample in range(samples)] for group in range(groups)]
    return made


class Fake:
    """What is used of a request."""

    def __init__(self, rid: str, limit: int) -> None:
        self.rid, self.limit = rid, limit


def test_a_unit_is_prefilled_once_as_soon_as_the_last_prompt_has_its_first_token() -> None:
    story: list[str] = []
    inbox = Inbox()

    async def stream(request: Request) -> AsyncIterator[dict[str, Any]]:
        group = int(request.rid[0])
        for number in range(2):
            await asyncio.sleep(0.01 + 0.03 * group)
            story.append(f"{request.rid} token {number}")
            reason = {"type": "length"} if number == 1 else None
            yield {"output_ids": [1], "meta_info": {"output_token_logprobs": [(-1.0, 1)], "finish_reason": reason}}

    streams = Streams(groups=[7, 8, 9], requests=requests(3, 2), stop_ids=(), forced=True, stream=stream, inbox=inbox)
    asyncio.run(streams.run())
    events = []
    while not inbox.events.empty():
        events.append(inbox.events.get())
    kinds = [type(event) for event in events]
    assert kinds.count(Prefilled) == 1
    assert kinds[-1] is Done
    assert kinds.count(Finished) == 3
    last = next(event for event in events if isinstance(event, Finished) and event.index == 2)
    assert events.index(Prefilled()) < events.index(last)
    first_tokens = [story.index(f"{group}-0 token 0") for group in range(3)]
    assert max(first_tokens) < story.index("2-1 token 0")
