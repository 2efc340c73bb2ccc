"""Files that are there whole, or as they were: whoever waits for the name never reads a part.

Owns the draft beside the file and its end. What must outlive a power cut asks for `durable`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that takes its name, in place of what had it before, at the end of the `with`.

    After an error what had the name is untouched, and nothing is left beside it.

    Args:
        path: of the file; its folder is there.
        durable: the content is on the disk before the name is taken.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """`whole_file` for content that is at hand.

    Raises:
        OSError: it cannot be written.
    """
    with whole_file(path, durable=durable) as file:
        file.write(content)
