"""What the checkpoint commands say. Knows checkpoint folders by `rollplex.checkpoint`; reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rollplex.checkpoint.folder import CHECKPOINTS, MANIFEST, folders, latest, read_manifest, verify
from rollplex.cli.target import find_run
from rollplex.errors import CheckpointError


def listing(run_dir: Path) -> list[str]:
    """One line for each checkpoint, as its manifest tells."""
    parent = run_dir / CHECKPOINTS
    newest = _latest(parent)
    lines = [f"{'checkpoint':<16} {'version':>8} {'MB':>10}  weights (digest)"]
    for folder in folders(parent):
        mark = "  newest" if folder == newest else ""
        lines.append(f"{folder.name:<16} {_manifest_line(folder)}{mark}")
    if len(lines) == 1:
        return [f"{run_dir}: no checkpoint yet"]
    return [f"{parent}", *lines]


def chosen(place: Path | None, runs_dir: Path) -> tuple[Path, ...]:
    """The checkpoint folders that are meant.

    Raises:
        ConfigError: neither a checkpoint folder nor a run.
    """
    if place is not None and ((place / MANIFEST).is_file() or place.parent.name == CHECKPOINTS):
        return (place,)
    return folders(find_run(place, runs_dir) / CHECKPOINTS)


def verified(chosen_folders: Sequence[Path], say: Callable[[str], None]) -> bool:
    """Verify each folder and say the result; whether all are good. No folder at all is not good."""
    if not chosen_folders:
        say("no checkpoint to verify")
        return False
    good = True
    for folder in chosen_folders:
        try:
            manifest = verify(folder)
        except CheckpointError as error:
            good = False
            say(f"BAD  {error}")
        else:
            size = sum(entry.size_bytes for entry in manifest.files.values())
            say(f"ok   {folder}: version {manifest.identity.version}, {len(manifest.files)} files, {_mb(size)} MB")
    return good


def _latest(parent: Path) -> Path | None:
    try:
        return latest(parent)
    except CheckpointError:
        return None  # the marks are a courtesy; verify says what is wrong


def _manifest_line(folder: Path) -> str:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return f"no readable manifest: {error.got}"
    size = sum(entry.size_bytes for entry in manifest.files.values())
    return f"{manifest.identity.version:>8} {_mb(size):>10}  {manifest.identity.digest[:16]}"


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f}"
