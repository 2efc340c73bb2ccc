"""SGLang by script: what an engine needs of a runtime and of mapped weights."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from rollplex.errors import EngineError, SegmentError
from rollplex.protocol.rollout import EngineSpec
from rollplex_rollout.sglang.requests import Pictures, Request
from rollplex_rollout.sglang.streams import Chunk

SPEC = EngineSpec(name="sglang", kv_tokens=200, max_running=8, context_tokens=100, prefill_tokens=64)
Script = Callable[[Request], AsyncIterator[Chunk]]


def chunk(tokens: list[int], reason: dict[str, Any] | None = None, **changes: Any) -> Chunk:
    meta = {"output_token_logprobs": [(-0.5 * (1 + token), token, None) for token in tokens], "finish_reason": reason}
    return {"output_ids": tokens, "meta_info": {**meta, **changes}}


def whole(request: Request) -> list[Chunk]:
    """All of a response, in two chunks."""
    end = chunk([2] * (request.limit - 1), {"type": "length"})
    return [chunk([1]), end] if request.limit > 1 else [chunk([1], {"type": "length"})]


async def prompt_reply(request: Request) -> AsyncIterator[Chunk]:
    for part in whole(request):
        yield part
        await asyncio.sleep(0)


class ScriptedSglang:
    """An event loop in a thread, streams by script, and a story of what was asked for."""

    def __init__(self, script: Script = prompt_reply) -> None:
        self.script = script
        self.story: list[str] = []
        self.dead = ""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def require_alive(self) -> None:
        if self.dead:
            raise EngineError("SGLang has failed", got=self.dead)

    def submit(self, work: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def stream(self, request: Request, pictures: Pictures | None) -> AsyncIterator[Chunk]:
        assert (pictures is None) == (request.pictures is None)
        self.story.append(f"send {request.rid[-13:]}")
        async for part in self.script(request):
            yield part

    def abort_all(self) -> None:
        self.story.append("abort all")

    def rpc(self, method: str, **parameters: bool | float | str) -> None:
        self.require_alive()
        self.story.append(method)

    def release_kv(self) -> None:
        self.story.append("release")

    def resume_kv(self) -> None:
        self.story.append("resume")

    def close(self) -> None:
        self.story.append("close")

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


async def _end_tasks() -> None:
    """None is left for the collector, which would complain in a later test."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class ScriptedRemote:
    def __init__(self) -> None:
        self.closed = False
        self.copies = 0
        self.lent: list[tuple[int, int]] = []

    def digest(self) -> str:
        return "d" * 64

    def look(self) -> None:
        raise SegmentError("A parameter is not in the segment that holds the weights")

    def copy(self) -> None:
        self.copies += 1

    def lend_inputs(self, fd: int, size_bytes: int) -> None:
        self.lent.append((fd, size_bytes))

    def close(self) -> None:
        self.closed = True


def silent(_: Request) -> AsyncIterator[Chunk]:
    async def never() -> AsyncIterator[Chunk]:
        yield chunk([1])
        await asyncio.sleep(3600)

    return never()
