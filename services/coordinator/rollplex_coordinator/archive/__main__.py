"""`python -m rollplex_coordinator.archive`: the dashboard over past runs; what `rollplex history` runs.

On a loopback address only. Its token is new each time and lies in a private folder that goes when it ends.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollplex.cli.signals import hold_back
from rollplex.errors import ConfigError, RollplexError
from rollplex.stop_signals import to_take
from rollplex_coordinator.http.listening import listen
from rollplex_coordinator.http.token import create_or_read

HOST = "127.0.0.1"
EXIT_FAILED, EXIT_CONFIG = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit code: 0 then, 2 for a folder or port that cannot be used."""
    parser = argparse.ArgumentParser(prog="rollplex history", description="Past runs in a browser.")
    parser.add_argument("runs_dir", type=Path)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args(argv)
    hold_back()  # from here on a signal waits for `sigwait`; the server's threads inherit that
    try:
        serve(args.runs_dir, args.port)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_CONFIG
    except (RollplexError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return 0


def serve(runs_dir: Path, port: int) -> None:
    """Serve, and return at the first signal to end.

    Raises:
        ConfigError: there is no such folder, or the port is taken.
        WaitError: the server does not come up, or does not end.
    """
    if not runs_dir.is_dir():
        raise ConfigError(
            "there is no such folder of runs",
            got=str(runs_dir),
            needed="a folder in which runs lie",
            do="Name it: rollplex history FOLDER (ROLLPLEX_RUNS_DIR names the usual one).",
        )
    listener = listen(HOST, port)
    from rollplex_coordinator.http.app import create_history_app  # noqa: PLC0415 - a taken port is told at once
    from rollplex_coordinator.http.server import Server  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="rollplex-history-") as folder:
        token = Path(folder) / "token"
        server = Server(create_history_app(runs_dir, create_or_read(token), ()), listener)
        try:
            server.start()
            sys.stdout.write(f"{server.url} shows the runs of {runs_dir}\ntoken: {token}\nCtrl-C ends it.\n")
            sys.stdout.flush()
            signal.sigwait(to_take())
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
