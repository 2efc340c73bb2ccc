"""A plan as a picture: a bar for each placement and phase, stacked by kind. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollplex.bench.plot import check_plot
from rollplex.planning.plan import Plan
from rollplex.protocol.common import Kind

_COLOURS: Final = {
    Kind.ACTOR_WEIGHTS: "#0072B2",
    Kind.REFERENCE_WEIGHTS: "#56B4E9",
    Kind.GRADIENTS: "#009E73",
    Kind.OPTIMIZER_STATE: "#E69F00",
    Kind.ROLLOUT_KV: "#D55E00",
    Kind.REFERENCE_PREFIX_KV: "#F0E442",
    Kind.ACTOR_PREFIX_KV: "#CC79A7",
    Kind.PREFIX_ACTIVATIONS: "#8E5EA2",
    Kind.WORKSPACE: "#777777",
    Kind.OVERHEAD: "#BBBBBB",
}


def write_plan_plot(plan: Plan, file: Path) -> None:
    """Draw the plan; its format is that of the suffix.

    Raises:
        ConfigError: as `check_plot`.
        OSError: the file cannot be written.
    """
    check_plot(file)
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import

    bars = [
        (f"{placement.name}{': ' + device.what if len(placement.devices) > 1 else ''}, {phase.phase}", phase)
        for placement in plan.placements
        for device in placement.devices
        for phase in device.phases
    ]
    figure = Figure(figsize=(9.0, 1.8 + 0.26 * len(bars)), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(bars)))
    left = [0.0] * len(bars)
    for kind, colour in _COLOURS.items():
        widths = [phase.by_kind.get(kind, 0) / 2**30 for _, phase in bars]
        if any(widths):
            axes.barh(places, widths, left=left, height=0.75, color=colour, label=kind.replace("_", " "))
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.axvline(plan.hbm_bytes / 2**30, color="black", linewidth=1.0, linestyle="--")
    axes.set_yticks(places, [label for label, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of one device; the line: what it has")
    axes.spines[["top", "right"]].set_visible(False)
    degrees = f"training TP {plan.training_tp}, rollout TP {plan.rollout_tp}"
    figure.suptitle(f"{plan.model} on {plan.gpus} devices, {degrees}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
