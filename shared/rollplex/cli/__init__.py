"""The command line. Knows how a run is started, nothing of what happens in it; imports no service and no torch.

rollplex up    checks the configuration, then becomes the coordinator (exec)
rollplex demo  writes the digits demo, runs the coordinator as a child, sums up what it left behind
"""

from __future__ import annotations


def main() -> int:
    """Entry point of `rollplex`: the exit code. Signals are taken first, everything else is imported after."""
    from rollplex.cli.signals import end_quietly  # noqa: PLC0415
    from rollplex.streams import open_standard_streams  # noqa: PLC0415

    end_quietly()
    open_standard_streams()
    from rollplex.cli.app import run  # noqa: PLC0415

    return run()
