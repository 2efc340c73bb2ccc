"""The control API of one run: its socket from the beginning, its server once there is time to import it.

Owns socket, server, the token and http.json. A port that is taken is refused before anything is started; FastAPI and
uvicorn are imported while the children import what they need.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex.config.job import HttpSection
from rollplex.whole_file import write_whole
from rollplex_coordinator.http.listening import listen
from rollplex_coordinator.http.token import create_or_read

if TYPE_CHECKING:
    from rollplex_coordinator.http.control import Control
    from rollplex_coordinator.http.server import Server


class Api:
    """One run's control API.

    Args:
        section: of the configuration.
        run_dir: gets the token and http.json.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's; or the token cannot be used.
    """

    def __init__(self, section: HttpSection, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._hosts = () if section.is_loopback else (section.host, socket.gethostname())
        self._listener = listen(section.host, section.port, allow_remote=section.allow_remote)
        self._token = create_or_read(run_dir / "token")
        self._server: Server | None = None

    def start(self, control: Control, run_id: str) -> str:
        """Serve, and tell others where; returns the address once requests are accepted.

        Raises:
            WaitError: the server does not come up.
        """
        from rollplex_coordinator.http.app import create_app  # noqa: PLC0415 - see the module
        from rollplex_coordinator.http.server import Server  # noqa: PLC0415

        app = create_app(control, self._run_dir / "journal.sqlite", self._token, self._hosts)
        self._server = Server(app, self._listener)
        self._server.start()
        note = json.dumps({"url": self._server.url, "run": run_id})
        write_whole(self._run_dir / "http.json", f"{note}\n".encode())
        return self._server.url

    def stop(self) -> None:
        """End it. Without `start`, only the socket is closed.

        Raises:
            WaitError: its thread did not end in time.
        """
        if self._server is None:
            self._listener.close()
        else:
            self._server.stop()
