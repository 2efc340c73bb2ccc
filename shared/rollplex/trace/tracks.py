"""Which tracks a reader sees, in which order, under which names. Pure.

rollplex RUN (SCHEDULE)
├ iterations, phases
├ rollout, prefix, trainer     per device
├ rewards, update, checkpoints and evaluations, events, start, requests that wait
└ leased on node N device D    counters: all, then by kind
"""

from __future__ import annotations

import re

from msgspec import Struct

from rollplex.protocol.common import Kind
from rollplex.trace import marks

_SERVICE = re.compile(r"(.+)\[(\d{1,6}):(\d{1,6})\]")
_ROLES = ("rollout", "prefix", "trainer")
_SERVICES_RANK, _AFTER_SERVICES, _MEMORY_RANK, _LAST_RANK = 100, 10**9, 2 * 10**9, 2**31 - 1
_AFTER = (marks.REWARDS, marks.UPDATES, marks.SAVES, marks.EVENTS, marks.STARTUP, marks.WAITS)
_KINDS = tuple(kind.value for kind in Kind)
ALL_KINDS = "all"
_DESCRIPTIONS = {
    marks.ITERATIONS: "From the prompts to the new weights; arguments: the step's metrics.",
    marks.PHASES: "What the node is doing. ROLLOUT is the window in which prefix work may run.",
    "rollout": "Decode units: prefill, then decode. A moment marks each group whose last response stopped.",
    "prefix": "Reference and actor prefix forward, scores under the reference, prefix backward.",
    "trainer": "Forward and backward of response suffixes; the optimizer step.",
    marks.REWARDS: "The user's reward functions, one group after the other.",
    marks.UPDATES: "The gate: gradients summed, readers drained, weights written from BEGIN to COMMIT, readers go on.",
    marks.SAVES: "Checkpoints written and evaluations run.",
    marks.EVENTS: "Starts and ends of processes and of the run, stop requests, errors, deaths.",
    marks.STARTUP: "Stages between the coordinator's start and the first iteration.",
    marks.WAITS: "Memory was asked for and was not free at once.",
}


class Label(Struct, frozen=True):
    """How a track is shown."""

    name: str
    rank: int
    """Lower is higher up."""
    description: str = ""


def label(track: str) -> Label:
    """Of a mark's track."""
    if track in _AFTER:
        return Label(track, _AFTER_SERVICES + _AFTER.index(track), _DESCRIPTIONS[track])
    if track in {marks.ITERATIONS, marks.PHASES}:
        return Label(track, int(track == marks.PHASES), _DESCRIPTIONS[track])
    match = _SERVICE.fullmatch(track)
    if match is None:
        return Label(track, _AFTER_SERVICES + len(_AFTER))
    role, node, index = match[1], int(match[2]), int(match[3])
    place = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    rank = min(_SERVICES_RANK + (node * 1_000 + index) * 10 + place, _AFTER_SERVICES - 1)
    return Label(f"{role} (node {node} device {index})", rank, _DESCRIPTIONS.get(role, ""))


def memory_label(device: str) -> Label:
    """Of the group of a device's counters."""
    node, _, index = device.partition(":")
    return Label(f"leased on node {node} device {index}", _MEMORY_RANK, "Bytes that the ledger has granted, by kind.")


def kind_label(kind: str) -> Label:
    """Of one counter of a device."""
    rank = _LAST_RANK if kind not in _KINDS else 1 + _KINDS.index(kind)
    return Label(kind.replace("_", " "), 0 if kind == ALL_KINDS else rank)
