"""One tracker as the coordinator sees it: a child that is fed rows, and that a run neither waits for nor ends by.

    core's thread ──put──► bounded queue ──feeder thread──► child's stdin
                                                            child's stdout ──listener thread──► state

    feeder      waits for: a row, room in the pipe    unblocked by: them, or the child's end
    listener    waits for: a line                     unblocked by: it, or the child's end

Rows that find the queue full are dropped and counted: a tracker that hangs costs the run nothing. A failure is told
once, in the log and in the status. Knows nothing of what the child does with a row.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger("rollplex.coordinator")

MAX_ROWS = 1_000
KILLED_S = 10.0
CLOSE_S = 10.0
"""How long the end of a run waits for its trackers, all of them together."""
ENDING_S = 90.0
"""From the end of a child's answers to its own: longer than `__main__` gives its package to finish."""
MAX_DETAIL = 500
State = Literal["starting", "ready", "failed"]


class Tracker:
    """A child that runs. `put` and the attributes belong to the core's thread.

    Args:
        name: of the tracker, for people.
        command: the program; reads `begin` and then rows, one JSON object a line, until the end of its input.
        begin: its first line.
        log_path: gets what it prints to its standard error.
        environment: of the child.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        begin: Mapping[str, object],
        log_path: Path,
        *,
        environment: Mapping[str, str],
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.name = name
        self.state: State = "starting"
        self.detail = ""
        self.dropped_rows = 0
        self._log_path = log_path
        self._closing = False
        self._rows: queue.Queue[bytes | None] = queue.Queue(max_rows)
        self._told = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("ab") as file:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    start_new_session=True,  # a Ctrl-C is the coordinator's to handle
                    env=dict(environment),
                )
        except OSError as error:
            self._fail(str(error))
            return
        self._rows.put_nowait(_line(begin))
        self._feeder = threading.Thread(target=self._feed, name=f"{name}-feeder", daemon=True)
        self._listener = threading.Thread(target=self._listen, name=f"{name}-listener", daemon=True)
        self._feeder.start()
        self._listener.start()

    def put(self, step: int, values: Mapping[str, float], evaluation: str = "") -> None:
        """Hand over one row; returns at once, whatever state the child is in.

        Args:
            values: finite numbers under TRL's names.
            evaluation: whose numbers they are; empty: the training's.
        """
        if self.state == "failed" or self._closing:
            return
        try:
            self._rows.put_nowait(_line({"step": step, "evaluation": evaluation, "values": dict(values)}))
        except queue.Full:
            self.dropped_rows += 1
            if self.dropped_rows == 1:
                log.warning("%s does not keep up: rows are left out; metrics.jsonl has them all", self.name)

    def ask_to_end(self) -> None:
        """No more rows will come; the child finishes with those that it has."""
        self._closing = True
        try:
            self._rows.put_nowait(None)
        except queue.Full:  # it hangs: what waits for it is given up
            self.dropped_rows += self._rows.qsize()
            self.kill()

    def await_end(self, deadline_s: float) -> None:
        """Wait for the child after `ask_to_end`; one that is still there then is killed."""
        if self._child is None:
            return
        try:
            self._child.wait(timeout=max(0.0, deadline_s))
        except subprocess.TimeoutExpired:
            log.warning("%s did not finish in time and was ended; its log is %s", self.name, self._log_path)
            self.kill()

    def kill(self) -> None:
        """End the child now, and what it has started: a package may have processes of its own."""
        if self._child is not None and self._child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)  # it leads a session, and so a group
            try:
                self._child.wait(timeout=KILLED_S)
            except subprocess.TimeoutExpired:
                log.error("%s (pid %d) was killed, but has not ended: the kernel holds it", self.name, self._child.pid)

    def _feed(self) -> None:
        assert self._child is not None, "the feeder is started after the child"
        assert self._child.stdin is not None, "opened as a pipe"
        try:
            with self._child.stdin as pipe:  # closing it writes what is left
                while (row := self._rows.get()) is not None:  # ended by the sentinel, or by the child's end
                    pipe.write(row)
                    pipe.flush()
        except OSError as error:  # the child ended; the listener says how
            log.debug("%s: %s", self.name, error)

    def _listen(self) -> None:
        assert self._child is not None, "the listener is started after the child"
        assert self._child.stdout is not None, "opened as a pipe"
        with self._child.stdout as pipe:
            for line in pipe:
                self._hear(line)
        try:
            code = self._child.wait(timeout=ENDING_S)  # its answers have ended: it ends too, or is not one of ours
        except subprocess.TimeoutExpired:
            self._fail(f"it said no more, but did not end within {ENDING_S:g} s")
            return
        if self.state != "failed" and (code != 0 or not self._closing):
            self._fail(f"its process ended with exit code {code}")

    def _hear(self, line: bytes) -> None:
        """A line that is none of ours is what a library printed."""
        try:
            said: Any = json.loads(line)
            state, detail = said["state"], str(said["detail"])
        except (ValueError, KeyError, TypeError):
            log.debug("%s printed %r", self.name, line)
            return
        if state == "ready":
            self.state, self.detail = "ready", detail[:MAX_DETAIL]
        else:
            self._fail(detail)

    def _fail(self, detail: str) -> None:
        with self._told:
            if self.state == "failed":
                return
            self.state, self.detail = "failed", detail[:MAX_DETAIL]
        log.warning(
            "tracker %s is left out from here on: %s. The run goes on, and metrics.jsonl has the same numbers; its log "
            "is %s",
            self.name,
            self.detail,
            self._log_path,
        )


def close_all(trackers: Sequence[Tracker], deadline_s: float = CLOSE_S) -> None:
    """End all of them within one deadline."""
    end = time.monotonic() + deadline_s
    for tracker in trackers:
        tracker.ask_to_end()
    for tracker in trackers:
        tracker.await_end(end - time.monotonic())


def _line(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, default=os.fspath).encode() + b"\n"
