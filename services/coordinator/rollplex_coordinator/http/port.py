"""Who listens on a TCP port of this machine, as far as /proc shows it. Used in error messages only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"


def listening_process(port: int) -> str:
    """ ", by process 12 (python)", or an empty text where it cannot be seen (another user's, another namespace's)."""
    links = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening_inodes(table, port)}
    for folder in Path("/proc").iterdir() if links else ():
        if folder.name.isdecimal() and any(link in links for link in _open_files(folder)):
            return f", by process {folder.name} ({_name(folder)})"
    return ""


def _listening_inodes(table: str, port: int) -> Iterator[str]:
    try:
        lines = Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == _LISTEN:
            yield fields[9]


def _open_files(process: Path) -> Iterator[str]:
    try:
        for entry in (process / "fd").iterdir():
            yield str(entry.readlink())
    except OSError:  # it ended, or it is another user's
        return


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return "ended"
