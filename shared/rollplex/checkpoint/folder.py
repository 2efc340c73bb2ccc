"""Checkpoint folders that a crash cannot half-write.

Owns: the order of writes, the manifest, LATEST, the check of a folder against its manifest, and which is the newest
good one. Does not know: models, tensors, segments; the caller's `write` fills the folder.

    parent/.tmp-step_7-<hex>/   1 write all, 2 fsync and hash each file, 3 MANIFEST.json with fsync, fsync the folders
    parent/step_7/              4 rename, fsync the parent
    parent/LATEST               5 written as .tmp-LATEST-<hex>, fsync, rename, fsync the parent

A crash before 4 leaves nothing but a temporary folder, which the next `save` removes; after 4 the folder is whole, and
LATEST names either it or its predecessor. Nothing here deletes a finished checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from rollplex.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""In a run directory: the folder of its checkpoints, each of them step_N."""
MANIFEST = "MANIFEST.json"
LATEST = "LATEST"
FORMAT = 2
"""2: the digest is that of decision 0008."""
HEADROOM = 1.2
"""Free space wanted before the first byte is written, in units of what will be written."""

_STEP = re.compile(r"step_([0-9]{1,18})")
_TEMPORARY = re.compile(r"\.tmp-.+-[0-9a-f]{32}")
_CHUNK_BYTES = 2**22


class FileEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint."""

    size_bytes: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Identity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights a checkpoint holds."""

    step: Annotated[int, Meta(ge=0)]
    version: Annotated[int, Meta(ge=0)]
    digest: str
    """Of the actor weights (`rollplex.memory.digest`)."""
    table_hash: str


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of MANIFEST.json; `files` are paths inside the folder with forward slashes, sorted."""

    format: Annotated[int, Meta(ge=1)]
    identity: Identity
    libraries: dict[str, str]
    files: dict[str, FileEntry]


def save(
    folder: Path,
    identity: Identity,
    *,
    needed_bytes: int,
    write: Callable[[Path], None],
    libraries: dict[str, str],
) -> int:
    """Write one checkpoint and point LATEST at it; returns the bytes of its files.

    A valid folder of the same identity that is already there is kept as it is (a crash after the rename, before the
    journal knew of it, makes the save happen twice).

    Args:
        folder: the final path; its parent is made if missing.
        needed_bytes: what `write` will write, about; `HEADROOM` times as much must be free.
        write: fills the temporary folder that it is given. Plain files and folders only.

    Raises:
        CheckpointError: no space, the disk refused, or `folder` holds something else. Nothing is left behind.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        if os.path.lexists(folder):
            manifest = _same_checkpoint(folder, identity)
        else:
            _check_space(folder.parent, needed_bytes)
            manifest = _write_folder(folder, identity, write, libraries)
        point_latest(folder)
    except OSError as error:
        raise CheckpointError(
            "The checkpoint could not be written",
            got=f"{type(error).__name__}: {error}",
            do="Free space or fix the permissions of the checkpoint folder; the previous checkpoint is untouched",
            where=str(folder),
        ) from error
    return sum(entry.size_bytes for entry in manifest.files.values())


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone; files are not compared with it.

    Raises:
        CheckpointError: there is none, or it is not of this form.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise _invalid(folder, f"{type(error).__name__}: {error}", "a readable manifest") from error


def verify(folder: Path) -> Manifest:
    """Compare a folder with its manifest: names, sizes, hashes, and nothing besides.

    Raises:
        CheckpointError: names the file that is missing, surplus, changed, outside the folder, or not a plain file.
    """
    try:
        manifest = read_manifest(folder)
        found = {name: path for name, path in _files(folder) if name != MANIFEST}
        if manifest.format != FORMAT:
            raise _invalid(folder, f"format {manifest.format}", f"format {FORMAT}")
        if set(found) != set(manifest.files):
            different = sorted(set(found) ^ set(manifest.files))
            raise _invalid(folder, f"files that are only here or only in the manifest: {different}", "the same files")
        for name, entry in manifest.files.items():
            if (seen := _hash_file(found[name], sync=False)) != entry:
                raise _invalid(folder, f"{name}: {seen.size_bytes} bytes, sha256 {seen.sha256}", str(entry))
    except OSError as error:
        raise _invalid(folder, f"{type(error).__name__}: {error}", "readable files") from error
    return manifest


class Rejected(Struct, frozen=True, kw_only=True):
    """A checkpoint that is there but may not be used, and why."""

    folder: Path
    error: CheckpointError


def newest_valid(parent: Path) -> tuple[tuple[Path, Manifest] | None, tuple[Rejected, ...]]:
    """The newest checkpoint whose files are what its manifest says, and the newer ones that are not.

    Newest by the number in the folder's name: the manifest of a damaged one cannot be trusted for that.

    Raises:
        OSError: the folder of checkpoints cannot be read.
    """
    rejected: list[Rejected] = []
    for folder in reversed(folders(parent)):
        try:
            return (folder, verify(folder)), tuple(rejected)
        except CheckpointError as error:
            rejected.append(Rejected(folder=folder, error=error))
    return None, tuple(rejected)


def folders(parent: Path) -> tuple[Path, ...]:
    """All finished checkpoints, oldest first; temporary ones, links and anything else are left out.

    Raises:
        OSError: the folder of checkpoints cannot be read.
    """
    if not parent.is_dir():
        return ()
    found = [(int(match[1]), path) for path in parent.iterdir() if (match := _STEP.fullmatch(path.name))]
    return tuple(path for _, path in sorted(found) if path.is_dir() and not path.is_symlink())


def latest(parent: Path) -> Path | None:
    """The folder that LATEST names; None if there is none yet.

    Raises:
        CheckpointError: LATEST holds anything but the name of a folder beside it.
    """
    try:
        name = (parent / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    if not name or name in {".", ".."} or Path(name).name != name or not (parent / name).is_dir():
        raise CheckpointError(
            "LATEST names no checkpoint", got=repr(name), needed="a folder beside it", where=str(parent)
        )
    return parent / name


def _write_folder(
    folder: Path, identity: Identity, write: Callable[[Path], None], libraries: dict[str, str]
) -> Manifest:
    temporary = folder.parent / f".tmp-{folder.name}-{uuid.uuid4().hex}"
    try:
        temporary.mkdir(mode=0o755)
        write(temporary)
        (temporary / MANIFEST).unlink(missing_ok=True)  # of the checkpoint that the run started from
        entries = {name: _hash_file(path, sync=True) for name, path in sorted(_files(temporary))}
        manifest = Manifest(format=FORMAT, identity=identity, libraries=libraries, files=entries)
        _write_file(temporary / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1))
        for inner, _, _ in os.walk(temporary, topdown=False):
            _sync_folder(Path(inner))
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(folder.parent)
    return manifest


def point_latest(folder: Path) -> None:
    """Make LATEST name this folder. Raises OSError."""
    temporary = folder.parent / f".tmp-{LATEST}-{uuid.uuid4().hex}"
    try:
        _write_file(temporary, f"{folder.name}\n".encode())
        temporary.replace(folder.parent / LATEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(folder.parent)


def _same_checkpoint(folder: Path, identity: Identity) -> Manifest:
    manifest = verify(folder)
    if manifest.identity != identity:
        raise CheckpointError(
            "Another checkpoint is already there",
            got=str(manifest.identity),
            needed=str(identity),
            do="Move it away, or let the run continue from it",
            where=str(folder),
        )
    return manifest


def _check_space(parent: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed_bytes * HEADROOM:
        raise CheckpointError(
            "Too little space for a checkpoint",
            got=f"{free} bytes free",
            needed=f"{int(needed_bytes * HEADROOM)} bytes",
            do="Free space, or put checkpoints on another disk; the previous checkpoint is untouched",
            where=str(parent),
        )


def _remove_leftovers(parent: Path) -> None:
    """Remove what a crash left; never follows a link."""
    for path in parent.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """All files below `folder` with their names relative to it. Raises CheckpointError on links and devices."""
    for inner, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(inner) / name
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                yield path.relative_to(folder).as_posix(), path
            elif not stat.S_ISDIR(mode):
                raise _invalid(
                    folder, f"{path.relative_to(folder)} is neither file nor folder", "plain files and folders"
                )


def _hash_file(path: Path, *, sync: bool) -> FileEntry:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return FileEntry(size_bytes=size, sha256=digest.hexdigest())


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _invalid(folder: Path, got: str, needed: str) -> CheckpointError:
    return CheckpointError(
        "The checkpoint does not match its manifest", got=got, needed=needed, do="Use another one", where=str(folder)
    )
