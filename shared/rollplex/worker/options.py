"""The command line that every service process takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from rollplex.protocol.common import Device, Role


class WorkerOptions(Struct, frozen=True, kw_only=True):
    """Who this process is and where its coordinator listens."""

    role: Role
    run_dir: Path
    device: Device
    incarnation: int
    connect_deadline_s: float


def parse_options(role: Role, argv: Sequence[str] | None) -> WorkerOptions:
    """Read `--run-dir DIR [--device NODE:INDEX] [--incarnation N] [--connect-deadline-s S]`."""
    parser = argparse.ArgumentParser(prog=f"rollplex {role}", description=f"The {role} service of a Rollplex node.")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory that the coordinator made")
    parser.add_argument("--device", default="0:0", help="NODE:INDEX of the device (default: 0:0)")
    parser.add_argument("--incarnation", type=int, default=1, help="number of this process since the run began")
    parser.add_argument("--connect-deadline-s", type=float, default=120.0, help="how long to wait for the coordinator")
    args = parser.parse_args(argv)
    try:
        node, index = (int(part) for part in args.device.split(":"))
    except ValueError:
        parser.error(f"--device must be NODE:INDEX, such as 0:0; got {args.device!r}")
    return WorkerOptions(
        role=role,
        run_dir=args.run_dir,
        device=Device(node=node, index=index),
        incarnation=args.incarnation,
        connect_deadline_s=args.connect_deadline_s,
    )
