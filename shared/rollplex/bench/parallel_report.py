"""What `rollplex bench parallel` found: the file that is kept, what is within bounds, and how it is told.

Owns the bound. Comparing is `parallel`.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from rollplex.bench.gradient_files import Difference
from rollplex.bench.gradients import BOUNDS, TIMES
from rollplex.bench.placement import Placement
from rollplex.bench.tables import Table
from rollplex.bench.weight_files import WeightsDifference

AGAIN: Final = Placement(training=1, replicas=1, rollout=1, engines=1)
"""One device once more: what the hardware itself makes of the same work."""


class Found(Struct, frozen=True, kw_only=True):
    """One iteration of one layout."""

    difference: Difference
    refreshed_bytes: int
    """After the update, of all devices."""
    rebuilt_bytes: int
    publish_s: float
    step_s: float
    idle_s: tuple[float, ...]
    """By device, of several."""
    weights: WeightsDifference | None = None
    """After the update; None: not asked for."""


class Compared(Struct, frozen=True, kw_only=True):
    """What is known so far; the file parallel.json."""

    dtype: str
    command: str
    iterations: int
    machine: str = ""
    software: str = ""
    aliased_bytes: dict[str, int] = {}
    """By layout, of all devices."""
    found: dict[str, tuple[Found, ...]] = {}
    """By layout, in the order of iterations."""

    rounding: Difference | None = None
    """Of one device's first iteration in float32; None: not measured, or the model is in float32."""

    @property
    def noise(self) -> float | None:
        """What one device's gradient differs by in bfloat16; None: not all of it is known."""
        again = self.found.get(str(AGAIN))
        if self.rounding is None or not again:
            return None
        return max(self.rounding.whole, *(one.difference.whole for one in again))

    @property
    def bound(self) -> float:
        """What a layout's gradient may differ by."""
        if self.dtype != "bfloat16":
            return BOUNDS[self.dtype]
        return BOUNDS[self.dtype] if self.noise is None else TIMES * self.noise

    @property
    def exceeded(self) -> tuple[str, ...]:
        """Layouts of which a gradient is further from the one device's than it may be."""
        return tuple(
            layout
            for layout, found in self.found.items()
            if layout != str(AGAIN) and not all(one.difference.whole <= self.bound for one in found)
        )


def table_of(compared: Compared) -> Table:
    """One line an iteration."""
    head = (
        *("layout", "iteration", "difference / norm", "worst parameter", "aliased", "refreshed", "rebuilt"),
        *("publish ms", "idle of devices"),
    )
    rows = tuple(
        (
            layout,
            str(step),
            f"{one.difference.whole:.2e}",
            f"{one.difference.worst:.2e}",
            f"{compared.aliased_bytes[layout]:,}",
            f"{one.refreshed_bytes:,}",
            f"{one.rebuilt_bytes:,}",
            f"{one.publish_s * 1e3:.1f}",
            " ".join(f"{idle / one.step_s:.0%}" for idle in one.idle_s) or "-",
        )
        for layout, found in compared.found.items()
        for step, one in enumerate(found)
    )
    return Table(head=head, rows=rows)


def notes(compared: Compared) -> list[str]:
    """On what it was measured, and within which noise."""
    lines = [f"{compared.machine}; {compared.software}; {compared.dtype}."]
    if compared.dtype == "bfloat16":
        again = [one.difference.whole for one in compared.found.get(str(AGAIN), ())]
        repeated = f"{max(again):.2e}" if again else "not known yet"
        rounded = f"{compared.rounding.whole:.2e}" if compared.rounding else "an unknown amount"
        lines.append(
            f"Noise of one device: {repeated} when its own iterations are repeated ({AGAIN} in the table), {rounded} "
            f"between its first iteration and the same in float32. A layout may differ by {TIMES:g} times the larger."
        )
    lines += [
        f"{layout}, weights after iteration {step}: the difference is {one.weights.whole:.2e} of the update; "
        f"{one.weights.unequal:.2%} of the numbers differ, by {one.weights.largest:.1e} at most "
        f"({one.weights.changed:.2%} were changed)."
        for layout, found in compared.found.items()
        for step, one in enumerate(found)
        if one.weights is not None
    ]
    within = "; ".join(compared.exceeded)
    lines.append(f"Bound {compared.bound:.1e}: " + (f"exceeded by {within}." if within else "none exceeds it."))
    return lines
