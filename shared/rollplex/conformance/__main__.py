"""`python -m rollplex.conformance`: what `rollplex conformance` starts, and a coordinator before it swaps a service."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from msgspec.structs import replace

from rollplex.conformance.drive import conformance
from rollplex.conformance.report import lines, to_json
from rollplex.conformance.sitting import Limits
from rollplex.errors import RollplexError
from rollplex.protocol.common import Role
from rollplex.whole_file import write_whole

EXIT_FAILED = 1
EXIT_USAGE = 2


def main() -> int:
    """0: it conforms. 1: it does not. 2: it could not be tested."""
    parser = argparse.ArgumentParser(prog="rollplex conformance")
    parser.add_argument("--json", type=Path, help="write the report there too")
    parser.add_argument("--case", action="append", default=[], help="judge this case only; may be repeated")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--received-s", type=float, default=Limits().received_s)
    parser.add_argument("--grace-s", type=float, default=Limits().grace_s)
    parser.add_argument("role", choices=[Role.ROLLOUT, Role.PREFIX, Role.TRAINER])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # what it started ends with it
    limits = replace(Limits(), received_s=args.received_s, grace_s=args.grace_s)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("COMMAND is missing")
    try:
        report = conformance(Role(args.role), command, limits=limits, cases=args.case, stop=args.stop)
    except RollplexError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if args.json is not None:
        write_whole(args.json, to_json(report))
    for line in lines(report):
        print(line)
    return 0 if report.passed else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
