"""A terminal whose screen tests can read: a pseudo-terminal, and what its lines show in the end."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
import tty
from types import TracebackType
from typing import Self

COLUMNS, ROWS = 110, 40
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Terminal:
    """`stream` is its slave, for programs to write to; a thread keeps what they write."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        tty.setraw(slave)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def close(self) -> str:
        """Everything that was written."""
        self.stream.close()
        self._reader.join(10.0)
        return b"".join(self._chunks).decode()

    def _read(self) -> None:
        with os.fdopen(self._master, "rb", buffering=0) as file:
            try:
                while chunk := file.read(65_536):
                    self._chunks.append(chunk)
            except OSError:  # how a pseudo-terminal tells that its last slave was closed
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lines_of(written: str) -> list[str]:
    """The lines that a terminal shows after this: colours are left out, cursor movements carried out."""
    lines, row, column = [""], 0, 0
    at = 0
    while at < len(written):
        if control := _CONTROL.match(written, at):
            at = control.end()
            match control[2]:
                case "A":
                    row = max(0, row - int(control[1] or 1))
                case "K":
                    lines[row] = ""
                case "h" | "l" | "m":
                    pass
                case other:
                    raise AssertionError(f"a control that this terminal does not know: {other}")
            continue
        character = written[at]
        at += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + character + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
