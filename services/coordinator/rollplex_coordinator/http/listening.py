"""The socket of the control API, bound before anything else is done; imports nothing of the server."""

from __future__ import annotations

import ipaddress
import socket

from rollplex.errors import ConfigError
from rollplex_coordinator.http.port import listening_process

BACKLOG = 128


def listen(host: str, port: int, *, allow_remote: bool = False) -> socket.socket:
    """A listening socket on `host` and `port` (0: any free one; `getsockname` says which).

    Listens at once: two sockets that are only bound could share a port.

    Raises:
        ConfigError: the port is taken (names by whom, where that can be seen), or the address is not this machine's,
            or other machines can reach it and `allow_remote` is False.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and not allow_remote:
            raise ConfigError(
                "the control API would be open to other machines",
                got=f"http.host {host}",
                needed="a loopback address, or http.allow_remote: true",
                do="Keep 127.0.0.1 and use an SSH tunnel; the token travels in clear text.",
            )
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError("http.host is no address of this machine", got=f"{host}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the control API cannot listen on {host}, port {port}",
            got=f"{error.strerror}{listening_process(port)}",
            needed="a free port of this machine",
            do="Stop the other program, or set http.port to another one, or to 0 for any.",
        ) from error
    return listener
