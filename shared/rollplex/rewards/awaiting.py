"""Functions that are coroutines: one that returns all rewards, or one for each completion, which then run together."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Sequence
from typing import Any

from rollplex.rewards.call import Call


def settled(returned: object, call: Call) -> object:
    """What a function returned, with its coroutines run to their end.

    Args:
        call: `sample` is set to the completion whose coroutine raised.
    """
    if inspect.iscoroutine(returned):
        return _run(returned)
    if isinstance(returned, list) and any(inspect.iscoroutine(item) for item in returned):
        return _run(_all(returned, call))
    return returned


def _run(work: Coroutine[Any, Any, object]) -> object:
    import asyncio  # noqa: PLC0415 - a tenth of a second that most functions do not need

    return asyncio.run(work)


async def _all(items: Sequence[object], call: Call) -> list[object]:
    import asyncio  # noqa: PLC0415

    async def each(index: int, item: object) -> object:
        try:
            return await item if inspect.iscoroutine(item) else item
        except BaseException:
            call.sample = index if call.sample is None else call.sample
            raise

    return await asyncio.gather(*(each(index, item) for index, item in enumerate(items)))
