"""Whether a service of a node makes progress, for whoever can see the run directory but not the control API.

    coordinator ──every PERIOD_S──► RUN/health.json ──► python -m rollplex.health --run-dir RUN --role trainer

The coordinator's loop writes it, so a fresh note says that the loop turns; what it says of a service is what the
coordinator heard from it. Owns the file's form and the judgement. Both clocks are CLOCK_MONOTONIC of one machine, which
its containers share. Imports little: it is run again and again.

    exit code 0   the service is there and heard of
    exit code 1   it is not, or nobody wrote a note; the line on the standard output says which
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from rollplex.whole_file import write_whole

FILE = "health.json"
PERIOD_S = 2.0
STALE_S = 20.0
"""A note this old: the coordinator's loop does not turn, or has ended."""
SILENT_S = 20.0
"""A worker says that it is alive every second, by a thread of its own."""
_UP = frozenset({"ready", "busy"})


class ServiceNote(Struct, frozen=True, kw_only=True):
    """One service. state: starting, ready, busy or dead. heard_age_s: since its last message, the first of which is its
    greeting; None before that."""

    service: str
    state: str
    busy_with: str = ""
    heard_age_s: float | None = None


class Note(Struct, frozen=True, kw_only=True):
    """Everybody's state when the loop turned. written_s: CLOCK_MONOTONIC."""

    written_s: float
    services: tuple[ServiceNote, ...]


class Verdict(Struct, frozen=True):
    """What is told of a service."""

    ok: bool
    text: str


_DECODER = msgspec.json.Decoder(Note)


def write(run_dir: Path, note: Note) -> None:
    """Put a note in the place of the last one, whole.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(run_dir / FILE, msgspec.json.encode(note) + b"\n")


def judge(note: Note, service: str, now_s: float) -> Verdict:
    """Whether `service`, such as trainer[0:0], makes progress, as far as the coordinator knows."""
    age_s = now_s - note.written_s
    if not 0.0 <= age_s <= STALE_S:
        return Verdict(ok=False, text=f"the coordinator has written nothing for {age_s:.0f} s")
    found = next((item for item in note.services if item.service == service), None)
    if found is None:
        return Verdict(ok=False, text=f"the coordinator knows no {service}")
    if found.state not in _UP:
        return Verdict(ok=False, text=f"{service} is {found.state}")
    silent_s = age_s + (found.heard_age_s or 0.0)
    if silent_s > SILENT_S:
        return Verdict(ok=False, text=f"{service} has said nothing for {silent_s:.0f} s")
    return Verdict(ok=True, text=f"{service} is {found.state}" + (f": {found.busy_with}" if found.busy_with else ""))


def look(run_dir: Path, service: str, now_s: float) -> Verdict:
    """`judge` the note in a run directory; none at all, or one that cannot be read, is no health."""
    try:
        note = _DECODER.decode((run_dir / FILE).read_bytes())
    except FileNotFoundError:
        return Verdict(ok=False, text=f"no coordinator has written {run_dir / FILE} yet")
    except (OSError, msgspec.DecodeError) as error:
        return Verdict(ok=False, text=f"{run_dir / FILE} cannot be read: {error}")
    return judge(note, service, now_s)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="rollplex.health", description="Whether a service makes progress.")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory that the coordinator made")
    parser.add_argument("--role", required=True, help="rollout, prefix or trainer")
    parser.add_argument("--device", default="0:0", help="NODE:INDEX of the device (default: 0:0)")
    args = parser.parse_args(argv)
    verdict = look(args.run_dir, f"{args.role}[{args.device}]", time.monotonic())
    sys.stdout.write(verdict.text + "\n")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
