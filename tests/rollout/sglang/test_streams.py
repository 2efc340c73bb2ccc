"""When a unit counts as prefilled, over streams of chunks without SGLang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rollplex_rollout.sglang.requests import Pictures, Request
from rollplex_rollout.sglang.streams import Done, Finished, Inbox, Prefilled, Streams


def requests(groups: int, samples: int) -> list[list[Request]]:
    made: list[Any] = [[Fake(f"{group}-{sample}", 2) for sample in range(samples)] for group in range(groups)]
    return made


LENGTH = {"type": "length"}


class Fake:
    """What is used of a request."""

    def __init__(self, rid: str, limit: int, pictures: Callable[[], Pictures] | None = None) -> None:
        self.rid, self.limit, self.pictures = rid, limit, pictures


@pytest.fixture
def reader() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def streams(
    made: list[list[Request]], stream: Callable[..., AsyncIterator[Any]], inbox: Inbox, reader: ThreadPoolExecutor
) -> Streams:
    groups = list(range(7, 7 + len(made)))
    return Streams(groups=groups, requests=made, stop_ids=(), forced=True, stream=stream, inbox=inbox, reader=reader)


def test_a_prompts_pictures_are_read_while_those_before_it_are_worked_on(reader: ThreadPoolExecutor) -> None:
    """By order, not by time: the second prompt's are read only after the first one was sent, which is sent first."""
    sent = [threading.Event() for _ in range(3)]
    read: list[int] = []
    of_group = [Pictures(media=(), positions=torch.empty(0), position_delta=group) for group in range(3)]

    def pictures(group: int) -> Callable[[], Pictures]:
        def make() -> Pictures:
            assert group == 0 or sent[group - 1].wait(10.0), "the prompt before was not sent meanwhile"
            read.append(group)
            return of_group[group]

        return make

    async def stream(request: Request, pictures: Pictures | None) -> AsyncIterator[dict[str, Any]]:
        group, sample = map(int, request.rid.split("-"))
        assert pictures is (of_group[group] if sample == 0 else None), "pictures go with the first response"
        sent[group].set()
        await asyncio.sleep(0)
        yield {"output_ids": [1], "meta_info": {"output_token_logprobs": [(-1.0, 1)], "finish_reason": LENGTH}}

    made: list[Any] = [
        [Fake(f"{group}-{sample}", 1, None if sample else pictures(group)) for sample in range(2)] for group in range(3)
    ]
    inbox = Inbox()
    asyncio.run(streams(made, stream, inbox, reader).run())
    events = []
    while not inbox.events.empty():
        events.append(inbox.events.get())
    assert events[-1] == Done(None)
    assert read == [0, 1, 2]


def test_pictures_that_cannot_be_read_end_the_unit(reader: ThreadPoolExecutor) -> None:
    async def stream(request: Request, _pictures: Pictures | None) -> AsyncIterator[dict[str, Any]]:
        assert not request.rid, "nothing may be sent"
        yield {}

    def broken() -> Pictures:
        raise OSError("gone")

    made: list[Any] = [[Fake("0-0", 1, broken)]]
    inbox = Inbox()
    asyncio.run(streams(made, stream, inbox, reader).run())
    done = inbox.events.get()
    assert isinstance(done, Done)
    assert isinstance(done.error, OSError)


def test_a_unit_is_prefilled_once_as_soon_as_the_last_prompt_has_its_first_token(reader: ThreadPoolExecutor) -> None:
    story: list[str] = []
    inbox = Inbox()

    async def stream(request: Request, _pictures: Pictures | None) -> AsyncIterator[dict[str, Any]]:
        group = int(request.rid[0])
        for number in range(2):
            await asyncio.sleep(0.01 + 0.03 * group)
            story.append(f"{request.rid} token {number}")
            reason = {"type": "length"} if number == 1 else None
            yield {"output_ids": [1], "meta_info": {"output_token_logprobs": [(-1.0, 1)], "finish_reason": reason}}

    asyncio.run(streams(requests(3, 2), stream, inbox, reader).run())
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
