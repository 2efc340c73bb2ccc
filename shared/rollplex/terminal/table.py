"""The table of a run: a view in, a rich renderable out. Pure; knows nothing of terminals or of views' origin."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollplex.terminal.view import Evaluation, Memory, View
from rollplex.terminal.words import brief, duration, size

_STATES = {"busy": "green", "ready": "", "starting": "yellow", "dead": "bold red"}
MAX_WAITS = 3


def render(view: View) -> RenderableType:
    """The whole table: a heading, then one line per thing that is known."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True, min_width=len("iterations"))
    lines.add_column()
    for label, content in _lines(view):
        lines.add_row(label, content)
    return Group(Text(view.run, style="bold", no_wrap=True, overflow="ellipsis"), lines)


def _lines(view: View) -> Iterator[tuple[str, RenderableType]]:
    yield "phase", _phase(view)
    if view.wanted or view.done:
        yield "iterations", _iterations(view)
    if view.reward is not None:
        yield "reward", Text(f"{view.reward:.3f}", style="bold")
    for evaluation in view.evaluations:
        yield "evaluation", _evaluation(evaluation)
    if view.timings:
        yield "seconds", _seconds(view)
    for memory in view.memory:
        yield "memory", _memory(memory)
    if view.services:
        yield "services", _services(view)
    for wait in view.waits[:MAX_WAITS]:
        yield "waiting", Text(f"for {wait.source}: {wait.what}, {duration(wait.age_s)}", style="yellow")


def _phase(view: View) -> Text:
    text = Text.assemble((view.phase, "bold cyan"), f"  {view.schedule}, weights version {view.version}")
    if view.stopping:
        text.append(f"  stopping: {view.stopping.replace('_', ' the ')}", style="yellow")
    return text


def _iterations(view: View) -> Table:
    done, total = view.done, max(view.done, view.wanted)
    left = "" if view.left_s is None else f", about {duration(view.left_s)} left"
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        f"{done}/{total}", ProgressBar(total=total, completed=done, width=30), f"{duration(view.elapsed_s)}{left}"
    )
    return grid


def _evaluation(evaluation: Evaluation) -> Text:
    values = ", ".join(f"{name} {value:.3f}" for name, value in evaluation.values)
    return Text.assemble(evaluation.name, (f" after {evaluation.step}: ", "dim"), values)


def _seconds(view: View) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for timing in view.timings:
        table.add_column(timing.name, justify="right")
    table.add_row("last", *(brief(timing.last_s) for timing in view.timings))
    table.add_row("median", *(brief(timing.median_s) for timing in view.timings))
    if view.hidden is None:
        return table
    return Group(table, Text(f"{view.hidden:.0%} of prefix time hidden under the rollout"))


def _memory(memory: Memory) -> Text:
    text = f"{size(memory.leased_bytes)} of {size(memory.budget_bytes)} leased, at most {size(memory.peak_bytes)}"
    return Text.assemble((f"device {memory.device}  ", "dim"), text)


def _services(view: View) -> Text:
    parts = [(f"{role} {state}   ", _STATES.get(state, "")) for role, state in view.services]
    return Text.assemble(*parts)
