"""`python -m rollplex_coordinator`: one coordinator, until its work is done or somebody stops it."""

from __future__ import annotations

import sys

from rollplex.streams import open_standard_streams
from rollplex_coordinator.options import parse_options
from rollplex_coordinator.processes.stop import Signals


def main() -> int:
    """Signals are taken over before anything heavy is imported, so that a Ctrl-C is never a traceback."""
    open_standard_streams()
    signals = Signals.install()
    options = parse_options()
    from rollplex_coordinator.run import run  # noqa: PLC0415 - after the signals

    return run(options, signals)


if __name__ == "__main__":
    sys.exit(main())
