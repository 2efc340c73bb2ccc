"""A result as a picture: one bar a mode, stacked by phases, with the range of the repeats. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from rollplex.bench.report import workload
from rollplex.bench.result import Result
from rollplex.bench.rows import PHASES
from rollplex.bench.soak import Soak
from rollplex.errors import ConfigError

SUFFIXES: Final = (".svg", ".png")
_COLOURS: Final = {
    "rollout": "#0072B2",
    "score": "#E69F00",
    "train": "#D55E00",
    "update": "#009E73",
    "other": "#BBBBBB",
}
"""Okabe and Ito's, which colour-blind readers can tell apart."""


def check_plot(file: Path) -> None:
    """Whether a plot can be written there; for before the bench.

    Raises:
        ConfigError: another suffix than .svg and .png, no such folder, or matplotlib is not installed.
    """
    if file.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            "A plot is not written in this format", got=file.name, needed="*.svg or *.png", where="--plot"
        )
    if not file.absolute().parent.is_dir():
        raise ConfigError("The folder of the plot is not there", got=str(file.absolute().parent), where="--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "Plots are drawn by matplotlib, which is not installed", do="pip install 'rollplex[bench]'.", where="--plot"
        )


def write_plot(result: Result, file: Path) -> None:
    """Draw the result; its format is that of the suffix.

    Raises:
        ConfigError: as `check_plot`.
        OSError: the file cannot be written.
    """
    check_plot(file)
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import

    modes = result.modes
    figure = Figure(figsize=(9.0, 1.9 + 0.45 * len(modes)), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(modes)))
    left = [0.0] * len(modes)
    for phase in PHASES:
        widths = [mode.seconds[phase].median for mode in modes]
        axes.barh(places, widths, left=left, height=0.62, color=_COLOURS[phase], label=phase)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    whole = [mode.seconds["iteration"] for mode in modes]
    axes.errorbar(
        [one.median for one in whole],
        places,
        xerr=[[one.median - one.low for one in whole], [one.high - one.median for one in whole]],
        fmt="none",
        ecolor="black",
        elinewidth=1.2,
        capsize=4,
    )
    longest = max(*left, *(one.high for one in whole))
    for place, mode, one, end in zip(places, modes, whole, left, strict=True):
        text = f"{one.median:.2f} s" + (
            f", {mode.hidden_share.median:.0%} of prefix hidden" if mode.schedule != "serial" else ""
        )
        axes.text(max(end, one.high) + 0.012 * longest, place, text, va="center", fontsize=9)
    axes.set_yticks(places, [mode.mode.name for mode in modes])
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.4 * longest)
    over = "one repeat" if result.repeats == 1 else f"median of {result.repeats} repeats; lines: lowest to highest"
    axes.set_xlabel(f"seconds of one iteration, {over}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result.made.machine.text}, {result.date[:10]}\n{workload(result)}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(PHASES), frameon=False)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)


def write_memory_plot(found: Soak, file: Path) -> None:
    """Draw resident memory over iterations, a line for each process.

    Raises:
        ConfigError: as `check_plot`.
        OSError: the file cannot be written.
    """
    check_plot(file)
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import

    figure = Figure(figsize=(9.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for one in found.growth:
        points = [(s.iterations, s.bytes[one.process] / 2**20) for s in found.samples if one.process in s.bytes]
        axes.plot([at for at, _ in points], [size for _, size in points], label=one.process)
    for epoch in range(1, found.epochs):
        axes.axvline(epoch * found.rows / found.prompts, color="#BBBBBB", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"iterations ({found.prompts} prompts each); lines where an epoch ends")
    axes.set_ylabel("resident, MiB")
    axes.set_title(f"{found.rows} rows of {found.image_bytes / 1e6:.1f} MB, {found.epochs} epochs", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(file)
