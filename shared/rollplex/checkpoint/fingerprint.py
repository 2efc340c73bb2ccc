"""Fingerprints of files: whether what a configuration names is still what it was."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rollplex.errors import ModelError

_CHUNK_BYTES = 2**22


def file_fingerprint(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def folder_fingerprint(folder: Path) -> str:
    """SHA-256 (hex) over the names and bytes of the files of a model folder, hidden ones and subfolders left out.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                digest.update(f"{path.name} {file_fingerprint(path)}\n".encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise ModelError("A file of the model folder cannot be read", got=str(error), where=str(folder)) from error
    return digest.hexdigest()
