"""What is judged of any conversation, whatever it was about, and when two sets of numbers are the same."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from rollplex.conformance.sitting import BESIDE, Sitting, Violation
from rollplex.protocol.common import Alive, Failed, Leaving, Received
from rollplex.protocol.rollout import GroupFinished, Prefilled

BUSY_S = 1.0
"""A message thread of its own needs less to acknowledge, whatever the others compute; where a run beside the test takes
the cores, and more is allowed for an idle worker, a fifth of that."""


def require_received(sitting: Sitting) -> None:
    """Raises Violation: not one Received for each instruction, in time."""
    acks: dict[int, list[float]] = {cause: [] for cause in sitting.sent_s}
    done: dict[int, float] = {}
    for heard in sitting.line.heard:
        if isinstance(heard.message, Received):
            if heard.message.cause not in acks:
                raise Violation(f"Received for cause {heard.message.cause}", "only for instructions that were sent")
            acks[heard.message.cause].append(heard.at_s)
        elif not isinstance(heard.message, Alive | Leaving | Failed | Prefilled | GroupFinished):
            done.setdefault(heard.message.cause, heard.at_s)
    for cause, times in acks.items():
        what = f"{sitting.kind_of(cause)} (cause {cause})"
        if len(times) != 1:
            raise Violation(f"{len(times)} times Received for {what}", "one")
        took_s = times[0] - sitting.sent_s[cause]
        computing = any(sitting.sent_s[cause] < done[other] < times[0] for other in done if other != cause)
        limit_s = max(BUSY_S, sitting.limits.received_s / 5) if computing else sitting.limits.received_s
        if took_s > min(limit_s, sitting.limits.received_s):
            more = ", and only when what ran had ended" if computing else ""
            raise Violation(f"Received for {what} after {took_s:.2f} s{more}", f"within {limit_s:g} s")


def require_alive(sitting: Sitting) -> None:
    """Raises Violation: too seldom, or progress stands still or goes back."""
    joined_s, gap_s = sitting.line.joined_s, sitting.limits.alive_every_s + sitting.limits.received_s

    def beats() -> list[tuple[float, int]]:
        return [(h.at_s, h.message.progress) for h in sitting.line.heard if isinstance(h.message, Alive)]

    assert joined_s is not None, "it was asked for its work"
    end_s = time.monotonic() + gap_s
    while len(beats()) < 2 and time.monotonic() < end_s:
        sitting.rest(sitting.limits.alive_every_s / 4)
    if len(found := beats()) < 2:
        raise Violation(f"Alive {len(found)} times in {time.monotonic() - joined_s:.1f} s", "every alive_every_s")
    longest = max(b[0] - a[0] for a, b in zip([(joined_s, 0), *found], found, strict=False))
    if longest > gap_s:
        raise Violation(f"{longest:.1f} s without Alive", f"one every {sitting.limits.alive_every_s:g} s")
    numbers = [progress for _, progress in found]
    if numbers != sorted(numbers) or (numbers[-1] == 0):
        raise Violation(f"progress {numbers[:3]} ... {numbers[-1]}", "a number that rises with each answer")


def require_answers(sitting: Sitting) -> None:
    """Raises Violation: an answer that nobody asked for, a second one, or none."""
    count: Counter[int] = Counter()
    for heard in sitting.answers():
        message = heard.message
        kind = type(message).__name__
        if message.cause not in sitting.sent_s:
            raise Violation(f"{kind} with cause {message.cause}", "a cause that an instruction had")
        if count[message.cause]:
            asked = sitting.kind_of(message.cause)
            raise Violation(
                f"{kind} after the answer to {asked} (cause {message.cause})", "one answer, and it the last"
            )
        count[message.cause] += not isinstance(message, BESIDE)
    if missing := [cause for cause in sitting.sent_s if not count[cause]]:
        raise Violation(f"no answer to {sitting.kind_of(missing[0])} (cause {missing[0]})", "one")


def require_frames(sitting: Sitting) -> None:
    """Raises Violation: something could not be decoded."""
    if bad := sitting.line.bad_frames:
        raise Violation(f"{len(bad)} frames that cannot be read; the first: {bad[0]}", "messages of the channel")


def require_nothing_left(sitting: Sitting) -> None:
    """Raises Violation: it left something behind."""
    if left := sitting.program.leftovers():
        raise Violation(", ".join(left[:5]), "nothing")


def close_enough(got: Any, needed: Any, what: str, tolerance: float) -> None:
    """Compare numbers, relative to the largest that is needed.

    Args:
        got, needed: numpy arrays of one shape.

    Raises:
        Violation: not finite, or too far apart.
    """
    scale = max(float(abs(needed).max()), 1e-12)
    with np.errstate(invalid="ignore"):
        apart = float(abs(got - needed).max()) / scale
    if not apart <= tolerance:  # NaN is not
        raise Violation(f"{what}: up to {apart:.2g} of the largest number apart from ours", f"at most {tolerance:g}")
