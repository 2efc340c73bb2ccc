"""A plan in words and tables. Numbers are GiB (2^30 bytes)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rollplex.planning.plan import DeviceHeld, PlacementHeld, Plan
from rollplex.protocol.common import Kind

WIDTH = 118


def text_of(plan: Plan) -> str:
    """The whole plan."""
    return "\n".join(_lines(plan)) + "\n"


def gib(size_bytes: int) -> str:
    """GiB, as a number."""
    return f"{size_bytes / 2**30:.2f}"


def _lines(plan: Plan) -> Iterator[str]:
    weights = plan.weights
    sides = f"training TP {plan.training_tp} (x {plan.replicas}), rollout TP {plan.rollout_tp} (x {plan.engines})"
    yield f"{plan.model}, {plan.dtype}, on {plan.gpus} devices of {gib(plan.hbm_bytes)} GiB: {sides}"
    prompts = f"{plan.prompts_per_iteration} prompts, {plan.group_size} responses each"
    tokens = f"{plan.prompt_tokens} tokens ({plan.image_tokens} of images) + {plan.response_tokens}"
    yield f"an iteration: {prompts}; the longest: {tokens}"
    yield ""
    yield "weights of a device under Rollplex, GiB"
    stored = [
        ("training shard", gib(weights.training_bytes), ""),
        ("rollout shard", gib(weights.rollout_bytes), ""),
        ("stored, for both", gib(weights.stored_bytes), ""),
        ("aliased", gib(weights.aliased_bytes), f"{weights.aliased_share:.1%} of the rollout shard"),
        ("refreshed", gib(weights.refreshed_bytes), "after each update, from other devices"),
        ("rebuilt", gib(weights.rebuilt_bytes), "after each update, into a copy of its own"),
        (
            "not split",
            f"{weights.unsplit_bytes / 2**30:.4f}",
            "on every rank whole: norms, patch embedding, some biases",
        ),
    ]
    yield _align([("", "GiB", ""), *stored])
    yield ""
    yield "at the peak, GiB of a device"
    yield _align([("placement", "devices", "peak", "in", "fits", "nothing waits at"), *_summary(plan)])
    for placement in plan.placements:
        yield ""
        yield from _placement(placement)


def _summary(plan: Plan) -> Iterator[tuple[str, ...]]:
    for placement in plan.placements:
        for device in placement.devices:
            fits = "yes" if device.fits else f"no, short by {gib(device.peak_bytes - plan.hbm_bytes)}"
            name = f"{placement.name}: {device.what}"
            yield name, _range(device), gib(device.peak_bytes), device.peak_phase, fits, gib(device.ample_bytes)
        if placement.refused:
            yield placement.name, "", "", "", "refused", ""


def _placement(placement: PlacementHeld) -> Iterator[str]:
    yield placement.name
    if placement.refused:
        yield f"  refused: {placement.refused}"
        return
    for device in placement.devices:
        yield f"  {device.what}, devices {_range(device)}, GiB of each"
        yield _align(list(_table(device)), indent=4)
        causes = "; ".join(f"{one.kind} ({one.owner}: {one.purpose}) {gib(one.bytes)}" for one in device.causes)
        yield f"    peak in {device.peak_phase}; most of it: {causes}"
    if placement.host_bytes:
        yield f"  host memory: {gib(placement.host_bytes)} GiB"
    if one := placement.largest:
        tokens = (
            f"a longest prompt of {one.prompt_tokens} tokens"
            if one.prompt_tokens
            else "no longest prompt, however short"
        )
        batch = f"{one.batch} of {one.batch_limit} {one.batch_of}"
        yield f"  fits at most, all else the same: {tokens}; {batch}"
    yield "  assumed"
    for assumption in placement.assumptions:
        yield textwrap.fill(assumption, WIDTH, initial_indent="    - ", subsequent_indent="      ")


def _table(device: DeviceHeld) -> Iterator[tuple[str, ...]]:
    yield ("kind", *(phase.phase for phase in device.phases))
    for kind in Kind:
        if any(kind in phase.by_kind for phase in device.phases):
            cells = (gib(phase.by_kind[kind]) if kind in phase.by_kind else "" for phase in device.phases)
            yield (str(kind), *cells)
    yield ("in all", *(gib(phase.bytes) for phase in device.phases))


def _range(device: DeviceHeld) -> str:
    first, last = device.devices[0], device.devices[-1]
    return str(first) if first == last else f"{first}-{last}"


def _align(rows: Sequence[Sequence[str]], indent: int = 2) -> str:
    """Columns: the first one, and those that hold words, to the left; numbers to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    lines = (
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        for row in rows
    )
    return "\n".join(" " * indent + line.rstrip() for line in lines)


def _is_number(cell: str) -> bool:
    return not cell or cell.replace(".", "").isdigit()
