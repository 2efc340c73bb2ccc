"""`rollplex status`: what a live run says of itself, and how one that has ended came to its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec
from msgspec import Struct

from rollplex.cli.api import Api, Device, Gpu, Ledger, Restart, Service, Status, Swap, Tracker, Wait, connect
from rollplex.cli.interrupts import Interrupted, interruptible
from rollplex.cli.summary import State, Summary, summarize
from rollplex.errors import StateError, WaitError
from rollplex.terminal.pace import KEPT, Pace
from rollplex.terminal.screen import Screen, can_draw
from rollplex.terminal.view import Evaluation, View, assemble, evaluation
from rollplex.terminal.words import duration, size

LOOK_EVERY_S, LINE_EVERY_S = 0.5, 1.0
"""Between two looks of a watch that draws, and of one that writes lines."""
_PATIENCE_S = 60.0
"""How long a watch goes on while the coordinator does not answer."""


class Live(Struct, frozen=True, kw_only=True):
    """What the coordinator says."""

    status: Status
    ledger: Ledger
    services: tuple[Service, ...]


class Report(Struct, frozen=True, kw_only=True):
    """A run; `live` is null for one that has ended or is only starting."""

    summary: Summary
    live: Live | None


def report(run_dir: Path, runs_dir: Path) -> Report:
    """Look at a run, and ask it if it lives.

    Raises:
        WaitError: it lives but does not answer.
    """
    summary = summarize(run_dir, runs_dir)
    if summary.state is not State.RUNNING:
        return Report(summary=summary, live=None)
    try:
        with connect(run_dir) as api:
            return Report(summary=summary, live=_ask(api))
    except StateError:  # it ended between the two looks
        return Report(summary=summarize(run_dir, runs_dir), live=None)


def as_json(found: Report) -> str:
    """The report as JSON, for programs."""
    return json.dumps(msgspec.to_builtins(found), indent=2)


def lines(found: Report) -> list[str]:
    """The report in words."""
    rows = list(_ended(found.summary) if found.live is None else _live(found.summary, found.live))
    return [f"{label:<11} {text}".rstrip() for label, text in rows]


def watch(run_dir: Path, runs_dir: Path, *, out: TextIO | None = None, say: Callable[[str], None]) -> int:
    """Show a live run until it ends: a table on a terminal, elsewhere a line for each second in which it went on.

    A signal ends the watch, not the run.

    Args:
        out: the terminal; None: the standard output.
        say: gets the lines, also those of the end.

    Returns:
        The exit code: 0, or that of the signal.

    Raises:
        WaitError: the coordinator did not answer for a minute.
    """
    terminal = sys.stdout if out is None else out
    screen = Screen(terminal) if can_draw(terminal) else None
    try:
        with interruptible():
            try:
                _Watch(run_dir, screen, say).follow()
            finally:
                if screen is not None:
                    screen.stop()
    except Interrupted as interrupted:
        return interrupted.exit_code
    for line in lines(report(run_dir, runs_dir)):
        say(line)
    return 0


class _Watch:
    def __init__(self, run_dir: Path, screen: Screen | None, say: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._screen = screen
        self._say = say
        self._pace = Pace()
        self._paced = 0
        self._said = -1

    def follow(self) -> None:
        """Until the run has ended."""
        silent_since_s: float | None = None
        while True:
            try:
                with connect(self._run_dir) as api:
                    while True:
                        self._show(api)
                        silent_since_s = None
                        time.sleep(LOOK_EVERY_S if self._screen else LINE_EVERY_S)
            except StateError:
                return
            except WaitError:
                silent_since_s = silent_since_s or time.monotonic()
                if time.monotonic() - silent_since_s > _PATIENCE_S:
                    raise
            time.sleep(LOOK_EVERY_S)

    def _show(self, api: Api) -> None:
        live = _ask(api)
        self._follow_pace(api, live.status)
        view = assemble(
            live.status,
            live.ledger.devices,
            live.services,
            pace=self._pace,
            evaluations=_evaluations(self._run_dir),
            now_wall_s=time.time(),
        )
        if self._screen is not None:
            if self._screen.due():
                self._screen.show(view)
        elif view.done != self._said:
            self._said = view.done
            self._say(_line(view))

    def _follow_pace(self, api: Api, status: Status) -> None:
        first = max(self._paced, status.iterations_done - KEPT)
        if first < status.iterations_done:
            for step, metrics in api.metrics_from(first, KEPT):
                self._pace.add(metrics)
                self._paced = step + 1


def _ask(api: Api) -> Live:
    return Live(status=api.status(), ledger=api.ledger(), services=api.services())


def _line(view: View) -> str:
    parts = [f"iteration {view.done}/{max(view.done, view.wanted)}  {view.phase}"]
    parts += [f"reward {view.reward:.3f}"] if view.reward is not None else []
    parts += [f"{timing.median_s:.2f} s" for timing in view.timings[:1]]
    parts += [f"about {duration(view.left_s)} left"] if view.left_s is not None else []
    return "  ".join(parts)


def _evaluations(run_dir: Path) -> list[Evaluation]:
    """The newest of each name, from eval.jsonl; a line that is only half written is left for the next look."""
    found: dict[str, Evaluation] = {}
    file = run_dir / "eval.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else ():
        if line.endswith("\n"):
            row = json.loads(line)
            found[row["name"]] = evaluation(row["name"], row["step"], row)
    return list(found.values())


def _live(summary: Summary, live: Live) -> Iterator[tuple[str, str]]:
    status = live.status
    yield "run", f"{status.run} ({summary.name})"
    yield "folder", summary.run_dir
    yield "state", f"running for {duration(time.time() - status.started_wall_s)}{_stopping(status)}"
    yield "phase", f"{status.phase}, step {status.step}, weights version {status.version}, {status.schedule}"
    yield "iterations", f"{status.iterations_done} done of {status.iterations_wanted} wanted"
    if summary.reward is not None:
        yield "reward", f"{summary.reward:.3f} in the last iteration"
    yield "checkpoint", summary.checkpoint or "none yet"
    for wait in status.waiting:
        yield "waiting", _wait(wait)
    for gpu in status.gpus:
        yield "gpu", _gpu(gpu)
    for tracker in status.trackers:
        yield "tracker", _tracker(tracker)
    for device in live.ledger.devices:
        yield "memory", _device(device)
    for request in live.ledger.waiting:
        yield "", f"{request.purpose} of {request.owner} waits for {size(request.size_bytes)} ({request.kind})"
    for service in live.services:
        busy = f": {service.busy_with}" if service.busy_with else ""
        again = f", started {service.incarnation} times" if service.incarnation > 1 else ""
        yield "service", f"{service.service} {service.state}{busy} (pid {service.pid}{again})"
    if status.restart is not None:
        yield "restarts", _restart(status.restart)
    if status.swap is not None:
        yield "swap", _swap(status.swap)


def _restart(restart: Restart) -> str:
    """All workers started again: how often, and why the last time."""
    age = duration(max(0.0, time.time() - restart.wall_s))
    where = restart.phase + ("" if restart.step is None else f", step {restart.step}")
    under_way = "" if restart.state == "done" else f" ({restart.state})"
    return f"{restart.number} of {restart.allowed}{under_way}, the last {age} ago: {restart.how} in {where}"


def _swap(swap: Swap) -> str:
    program = " ".join(swap.command)
    if swap.state == "refused":
        return f"{swap.role} by {program}: refused by {swap.case}: got {swap.got}; needed {swap.needed}"
    return f"{swap.role} by {program}: {swap.state}" + ("" if swap.step is None else f" from iteration {swap.step + 1}")


def _ended(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "run", f"{summary.run or 'none yet'} ({summary.name})"
    yield "folder", summary.run_dir
    yield "state", summary.state + ("" if summary.ended_s is None else f", {_ago(summary.ended_s)}")
    if summary.reason and summary.reason != summary.state:
        yield "reason", summary.reason
    if summary.log_path:
        yield "log", summary.log_path
    if summary.started_s is not None and summary.ended_s is not None:
        yield "lasted", duration(summary.ended_s - summary.started_s)
    wanted = summary.iterations_wanted or 0  # none were wanted at the start of a run that serves
    yield "iterations", f"{summary.iterations} of {wanted}" if wanted >= summary.iterations else f"{summary.iterations}"
    if summary.reward is not None:
        yield "reward", f"{summary.reward:.3f} in the last iteration"
    yield "checkpoint", summary.checkpoint or "none"


def _stopping(status: Status) -> str:
    return f", stopping {status.stopping.replace('_', ' the ')}" if status.stopping else ""


def _tracker(tracker: Tracker) -> str:
    dropped = f"; {tracker.dropped_rows} rows left out" if tracker.dropped_rows else ""
    return f"{tracker.name} {tracker.state}" + (f": {tracker.detail}" if tracker.detail else "") + dropped


def _wait(wait: Wait) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(wait.since_wall_s))
    return (
        f"for {wait.source}: {wait.awaited}, since {since} ({duration(wait.age_s)}); "
        f"an error after {duration(wait.deadline_s)} without progress"
    )


def _gpu(gpu: Gpu) -> str:
    shared = f"shared by {gpu.sharing_used}"
    if gpu.sharing_used != gpu.sharing_asked:
        shared += f" instead of {gpu.sharing_asked}" + (f" ({gpu.why})" if gpu.why else "")
    used = "" if gpu.used_bytes is None else f", {size(gpu.used_bytes)} of {size(gpu.total_bytes)} used by this run"
    beside = "" if gpu.overhead_bytes is None else f", {size(gpu.overhead_bytes)} of it beside leases"
    return f"{gpu.name}, {shared}{used}{beside}"


def _device(device: Device) -> str:
    return (
        f"device {device.device}: {size(device.leased_bytes)} leased of a budget of {size(device.budget_bytes)}, "
        f"at most {size(device.peak_bytes)} so far"
    )


def _ago(at_s: float) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at_s))}, {duration(max(0.0, time.time() - at_s))} ago"
