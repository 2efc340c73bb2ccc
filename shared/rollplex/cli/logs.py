"""`rollplex logs`: the services' logs of a run, one, or all in the order of their times; also as they are written.

    2026-11-29 19:30:01,123 trainer INFO loaded      a record begins with its time
      whatever follows                               belongs to the record before it

Knows the form of the workers' lines, not their content.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rollplex.errors import ConfigError
from rollplex.protocol.claim import holder_of
from rollplex.similar import closest

LOGS = "logs"
"""In the run directory."""
LOOK_EVERY_S = 0.25
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", re.ASCII)
_TAIL_BYTES = 2**20
"""Of each log no more than its end is read."""


def show(run_dir: Path, service: str | None, *, lines: int, follow: bool, say: Callable[[str], None]) -> None:
    """Say the last lines of one log, or of all together; then, if wanted, what is added, until the run ends.

    Args:
        service: "rollout", or as other places show it, "rollout[0:0]"; None: all.
        lines: how many of the present ones.

    Raises:
        ConfigError: there is no such log.
        OSError: a log cannot be read.
    """
    logs = [_Log(path) for path in _chosen(run_dir, service)]
    width = max((len(log.name) for log in logs), default=0)

    def tell(entries: Iterable[tuple[str, str]]) -> None:
        for name, line in entries:
            say(line if service is not None else f"{name:<{width}} | {line}")

    tell(_last(_merged(logs), lines))
    while follow:
        live = holder_of(run_dir) is not None  # asked first, so that the last lines of a run that ends are not lost
        known = {log.path for log in logs}
        if service is None:
            logs += [_Log(path) for path in sorted((run_dir / LOGS).glob("*.log")) if path not in known]
        tell(_merged(logs))
        if not live:
            return
        time.sleep(LOOK_EVERY_S)


class _Log:
    """One file, read from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._at = max(0, path.stat().st_size - _TAIL_BYTES)
        self._cut = self._at > 0
        self._time = ""

    def records(self) -> Iterator[tuple[str, str, str]]:
        """Time, name and line of each whole line that was added. A line without time has that of the one before."""
        with self.path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole, newline, _ = text.rpartition(b"\n")
        self._at += len(whole) + len(newline)
        found = whole.decode("utf-8", "replace").split("\n") if newline else []
        for line in found[1:] if self._cut else found:
            if match := _TIME.match(line):
                self._time = match[0]
            yield self._time, self.name, line
        self._cut = self._cut and not newline


def _merged(logs: Sequence[_Log]) -> list[tuple[str, str]]:
    """What was added to all logs, by time; lines of one log keep their order."""
    records = [record for log in logs for record in log.records()]
    return [(name, line) for _, name, line in sorted(records, key=lambda record: record[0])]


def _last(entries: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    return entries[-count:] if count else []


def _chosen(run_dir: Path, service: str | None) -> list[Path]:
    found = sorted((run_dir / LOGS).glob("*.log"))
    if service is None:
        return found
    name, _, device = service.removesuffix("]").partition("[")
    several = [path for path in found if path.stem.startswith(f"{name}-")]
    if device:  # node:index, of a role that several devices have a process of
        several = [path for path in several if path.stem == f"{name}-{device.rpartition(':')[2]}"]
    if chosen := [path for path in found if path.stem == name] + several:
        return chosen
    names = [path.stem for path in found]
    close = closest(name, names)
    raise ConfigError(
        "There is no log of such a service",
        got=service,
        needed=f"one of {', '.join(names)}" if names else "a run whose services have been started here",
        do=f"Did you mean {close}?" if close else "",
        where=str(run_dir / LOGS),
    )
