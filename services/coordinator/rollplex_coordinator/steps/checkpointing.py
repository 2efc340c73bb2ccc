"""Asks for checkpoints, journals them, and prunes old ones.

Owns which folders stay. The trainer writes them, of several the first; the gate is open and nothing else runs
meanwhile. A stop waits for it for a few seconds, then interrupts it: a folder has its name only once it is whole.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rollplex.checkpoint.folder import CHECKPOINTS, read_manifest
from rollplex.checkpoint.state import RunState, encode
from rollplex.config.loading import dump
from rollplex.errors import CheckpointError
from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex.latest import link_latest
from rollplex.protocol.trainer import CheckpointSaved, SaveCheckpoint
from rollplex_coordinator.steps.context import Context

log = logging.getLogger("rollplex.coordinator")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        wanted: says how many iterations the run is to have at its end.
    """

    def __init__(self, context: Context, wanted: Callable[[], int] = lambda: 0) -> None:
        self._c = context
        self._wanted = wanted
        self._folders: list[str] = []
        self.newest: tuple[int, int] | None = None
        """Step and version of the newest one."""

    @property
    def folder(self) -> str | None:
        """Of the newest one; None before the first."""
        return self._folders[-1] if self._folders else None

    def adopt(self, chosen: Sequence[Path], step: int, version: int) -> None:
        """What an earlier attempt of the run left: the last one is what this one went on from.

        The journal of this attempt names them too.
        """
        for folder in chosen:
            try:
                manifest = read_manifest(folder)
            except CheckpointError as error:
                log.warning("%s", error)
                continue
            self._folders.append(str(folder))
            self._c.record.append_durable(
                events.CheckpointSaved(
                    step=manifest.identity.step,
                    version=manifest.identity.version,
                    folder=str(folder),
                    size_bytes=sum(entry.size_bytes for entry in manifest.files.values()),
                )
            )
        self.newest = (step, version)

    def save(self) -> None:
        """Write one of the present version; pumps until its folder is in place and journalled.

        Raises:
            CheckpointError: there is no place for it.
            WorkerFailed: carries the CheckpointError.
        """
        c = self._c
        step, version = c.gate.step, c.record.version
        if self.newest == (step, version):
            log.debug("step %d is checkpointed already", step)
            return
        folder = c.run_dir / CHECKPOINTS / f"step_{step}"
        try:
            folder.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                "The folder of checkpoints cannot be made",
                got=error.strerror or str(error),
                needed="a run directory as it was made",
                do="See what has become of it; nothing is written there until it is one.",
                where=str(folder.parent),
            ) from error
        c.record.enter(Phase.CHECKPOINT)
        c.memory.enter(Phase.CHECKPOINT)
        c.link.begin_atomic()
        saved = c.link.call_team(
            c.fleet.trainers[0].only(0),
            lambda cause, _rank: SaveCheckpoint(
                cause=cause, step=step, version=version, folder=str(folder), state_json=self._state(step, version)
            ),
            f"save version {version} to {folder}",
            c.config.deadlines.checkpoint_s,
            CheckpointSaved,
        )
        c.record.append_durable(
            events.CheckpointSaved(step=step, version=version, folder=saved.folder, size_bytes=saved.size_bytes)
        )
        c.link.end_atomic()
        self.newest = (step, version)
        self._folders.append(saved.folder)
        if problem := link_latest(folder.parent, folder):
            log.warning("%s", problem)
        self._prune()
        c.record.enter(Phase.IDLE)
        c.memory.enter(Phase.IDLE)

    def _prune(self) -> None:
        """Only folders that this run made, only after a newer one is durable."""
        keep = self._c.config.checkpoint.keep
        while len(self._folders) > keep:
            folder = self._folders.pop(0)
            try:
                shutil.rmtree(folder)
            except OSError as error:
                log.warning("an old checkpoint could not be removed: %s", error)

    def _state(self, step: int, version: int) -> str:
        """What is needed, beside weights and optimizer state, to go on from here."""
        c = self._c
        return encode(
            RunState(
                step=step,
                version=version,
                seed=c.config.run.seed,
                wanted=self._wanted(),
                failed_votes=c.gate.failed_votes,
                table_hash=c.sizes.table.hash,
                config=dump(c.config),
                fingerprints=c.fingerprints,
            )
        )
