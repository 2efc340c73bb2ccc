"""Going on from a checkpoint: which one, whether the run is still the same, and the records as they were at it.

    choose ─► judge (configuration) ─► set_back ─► … data check, load … ─► judge (fingerprints) ─► iterate from step N

Owns these decisions and the files that are moved or cut. Restores no weights (trainer) and starts nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from rollplex.checkpoint.compare import (
    Difference,
    Effect,
    config_differences,
    fingerprint_differences,
    library_differences,
)
from rollplex.checkpoint.folder import CHECKPOINTS, Manifest, folders, newest_valid, point_latest, verify
from rollplex.checkpoint.state import RunState, read
from rollplex.config import yaml_text
from rollplex.config.checks import TRAIN
from rollplex.config.config import Config
from rollplex.errors import CheckpointError, ConfigError
from rollplex.latest import link_latest
from rollplex.protocol.trainer import Restore
from rollplex_coordinator.options import ResumeOptions
from rollplex_coordinator.records.attempts import new_attempt
from rollplex_coordinator.records.sample_files import FOLDER as SAMPLES
from rollplex_coordinator.records.sample_files import move_later

RECORDS = ("metrics.jsonl", "eval.jsonl", "completions.jsonl")
"""Cut back to the checkpoint, and gone on with."""
LOGS = ("journal.sqlite", "logs", "http.json")
"""Each attempt has its own; what is cut back instead (`set_back`) goes on in the same files."""

log = logging.getLogger("rollplex.coordinator")


class Resumption(Struct, frozen=True, kw_only=True):
    """A checkpoint to go on from."""

    folder: Path
    manifest: Manifest
    state: RunState
    passed_over: tuple[str, ...] = ()
    """Why newer ones are not used."""
    attempt: Path | None = None
    """Where `set_back` put what came after."""

    @property
    def restore(self) -> Restore:
        """What the trainer is told."""
        identity = self.manifest.identity
        return Restore(folder=str(self.folder), version=identity.version, digest=identity.digest)


def resume(
    run_dir: Path,
    options: ResumeOptions,
    config: Config,
    wanted_of: Callable[[RunState], int | None],
    say: Callable[[str], object],
) -> Resumption:
    """Choose, judge the configuration, set the records back, and tell about all of it.

    Nothing is moved before the configuration is accepted.

    Args:
        wanted_of: iterations that the run is to have at its end; None: that is not known yet.

    Raises:
        CheckpointError, ConfigError: see `choose` and `judge_config`; or the run has so many iterations already.
        OSError: see `set_back`.
    """
    resumption = choose(run_dir, options.checkpoint)
    for why in resumption.passed_over:
        say(f"warning: {why}")
    for warning in judge_config(resumption, config, options.accepted):
        say(f"warning: {warning}")
    state = resumption.state
    wanted = wanted_of(state)
    if wanted is not None and wanted <= state.step:
        raise ConfigError(
            "The run has that many iterations already",
            got=f"{wanted} wanted in all, {state.step} done in {resumption.folder.name}",
            needed="more",
            do="Raise run.iterations or --iterations: both count from the beginning of the run.",
            where=str(run_dir),
        )
    attempt = set_back(run_dir, resumption, config)
    resumption = msgspec.structs.replace(resumption, attempt=attempt)
    say(f"rollplex: goes on after {state.step} iterations, from {resumption.folder}; what came later is in {attempt}")
    return resumption


def choose(run_dir: Path, wanted: Path | None) -> Resumption:
    """The checkpoint to go on from.

    Args:
        wanted: this one; None: the newest good one.

    Raises:
        CheckpointError: there is none, the wanted one is damaged or not of this run, or its state cannot be read.
    """
    parent = run_dir / CHECKPOINTS
    if wanted is not None:
        wanted = wanted.resolve()
        if wanted.parent != parent.resolve():
            raise CheckpointError(
                "This checkpoint is not one of the run", got=str(wanted), needed=f"a folder in {parent}"
            )
        return _resumption(parent / wanted.name, verify(wanted), ())
    found, rejected = newest_valid(parent)
    passed_over = tuple(f"{bad.folder.name} is not used: {bad.error}" for bad in rejected)
    if found is None:
        raise CheckpointError(
            "There is no checkpoint to go on from",
            got="; ".join(passed_over) or "none at all",
            needed="one whose files are what its manifest says",
            do="Start the run again without --resume; what it left moves to attempts/.",
            where=str(parent),
        )
    return _resumption(*found, passed_over)


def judge_config(resumption: Resumption, config: Config, accepted: Collection[str]) -> tuple[str, ...]:
    """Warnings about a configuration that is not as it was.

    Raises:
        ConfigError: a difference that would change the result and was not accepted.
    """
    was = yaml_text.parse(resumption.state.config, where=f"{resumption.folder}: configuration").value
    if not isinstance(was, dict):
        raise ConfigError("The configuration in this checkpoint is no mapping", where=str(resumption.folder))
    return _judge(config_differences(was, config.model_dump(mode="json"), accepted=accepted))


def judge_fingerprints(resumption: Resumption, now: Mapping[str, str], accepted: Collection[str]) -> tuple[str, ...]:
    """Warnings about data, model or reward functions that are not as they were.

    Raises:
        ConfigError: a difference that would change the result and was not accepted.
    """
    return _judge(fingerprint_differences(resumption.state.fingerprints, now, accepted=accepted))


def judge_libraries(resumption: Resumption, now: Mapping[str, str]) -> tuple[str, ...]:
    """Warnings about libraries of another version than those that wrote the checkpoint."""
    return _judge(library_differences(resumption.manifest.libraries, now))


def set_back(run_dir: Path, resumption: Resumption, config: Config) -> Path:
    """Make the records those of the moment of the checkpoint; returns the folder of what was moved away.

    Journal, logs, newer checkpoints and later samples move to attempts/N; metrics.jsonl, eval.jsonl and
    completions.jsonl lose what came after, and stay whole there under their names.

    Raises:
        OSError: something cannot be moved or written.
    """
    attempt = new_attempt(run_dir)
    for name in LOGS:
        for path in sorted(run_dir.glob(f"{name}*")):
            path.rename(attempt / path.name)
    newer = [folder for folder in folders(run_dir / CHECKPOINTS) if number(folder) > number(resumption.folder)]
    if newer:
        (attempt / CHECKPOINTS).mkdir()
        for folder in newer:
            folder.rename(attempt / CHECKPOINTS / folder.name)
        point_latest(resumption.folder)
    if problem := link_latest(run_dir / CHECKPOINTS, resumption.folder):
        log.warning("%s", problem)
    step = resumption.state.step
    due = {section.name for section in config.eval if section.due(step, last=False)}

    def evaluation_kept(row: dict[str, object]) -> bool:
        """One at the end of the earlier attempt is not one of the whole run, unless it was due anyway."""
        at = row["step"]
        return isinstance(at, int) and (at < step or (at == step and row.get("name", row.get("source")) in due))

    def trained_kept(row: dict[str, object]) -> bool:
        return isinstance(row["step"], int) and row["step"] < step

    move_later(run_dir, step, attempt)
    metrics, evals, completions = RECORDS
    cut(run_dir / metrics, attempt, trained_kept)
    cut(run_dir / evals, attempt, evaluation_kept)
    cut(
        run_dir / completions,
        attempt,
        lambda row: trained_kept(row) if row.get("source") == TRAIN else evaluation_kept(row),
    )
    return attempt


def undo(run_dir: Path, attempt: Path) -> None:
    """Nothing came of a resumption: what `set_back` cut or moved is as it was before, but for journal and logs.

    So an attempt that was refused, or stopped while it loaded, does not hide newer checkpoints from the next one.

    Raises:
        OSError: something cannot be moved.
    """
    for name in RECORDS:
        if (attempt / name).is_file():
            (attempt / name).replace(run_dir / name)
    for folder in sorted((attempt / SAMPLES).glob("*")):
        folder.replace(run_dir / SAMPLES / folder.name)
    moved = folders(attempt / CHECKPOINTS)
    for folder in moved:
        folder.rename(run_dir / CHECKPOINTS / folder.name)
    if moved:
        newest = folders(run_dir / CHECKPOINTS)[-1]
        point_latest(newest)
        if problem := link_latest(run_dir / CHECKPOINTS, newest):
            log.warning("%s", problem)


def wanted_before(state: RunState, config: Config) -> int:
    """How far a run goes on if nobody says: as far as it was to, unless that was reached or run.iterations changed."""
    was = yaml_text.parse(state.config, where="a checkpoint's configuration").value
    section = was.get("run") if isinstance(was, dict) else None
    same = isinstance(section, dict) and section.get("iterations") == config.run.iterations
    return state.wanted if same and state.wanted > state.step else config.run.iterations


def evaluated(run_dir: Path) -> set[tuple[str, int]]:
    """Name and step of each evaluation that eval.jsonl holds."""
    rows = _rows(run_dir / "eval.jsonl")
    return {(str(row["name"]), int(str(row["step"]))) for _, row in rows}


def cut(file: Path, attempt: Path, keep: Callable[[dict[str, object]], bool]) -> None:
    """Leave only the rows to keep, in one rename; the file as it was goes to `attempt`. Nothing to cut: untouched.

    A last line that was cut short by a crash is dropped.
    """
    if not file.is_file():
        return
    partial = file.with_name(f".{file.name}.new")
    with partial.open("wb") as out:
        for line, row in _rows(file):
            if keep(row):
                out.write(line)
        out.flush()
        os.fsync(out.fileno())
    if partial.stat().st_size == file.stat().st_size:
        partial.unlink()
        return
    try:
        os.link(file, attempt / file.name)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, attempt / file.name)
    partial.replace(file)


def number(folder: Path) -> int:
    """The step in the name of a checkpoint folder."""
    return int(folder.name.removeprefix("step_"))


def _resumption(folder: Path, manifest: Manifest, passed_over: tuple[str, ...]) -> Resumption:
    state = read(folder)
    identity = manifest.identity
    if (state.step, state.version, state.table_hash) != (identity.step, identity.version, identity.table_hash):
        raise CheckpointError(
            "The state of the run in this checkpoint is not that of its weights",
            got=f"step {state.step}, version {state.version}",
            needed=f"step {identity.step}, version {identity.version}",
            where=str(folder),
        )
    return Resumption(folder=folder, manifest=manifest, state=state, passed_over=passed_over)


def _judge(differences: Sequence[Difference]) -> tuple[str, ...]:
    refused = [d for d in differences if d.effect is Effect.REFUSE]
    if refused:
        raise ConfigError(
            "This would not be the same run any more",
            got="; ".join(map(str, refused)),
            needed="what changes the result as it was",
            do=f"Undo the change, start a new run, or accept it: --accept {refused[0].key}",
        )
    return tuple(f"not as it was: {difference}" for difference in differences)


def _rows(file: Path) -> Iterator[tuple[bytes, dict[str, object]]]:
    """Each whole line with its object, one at a time: these files can be large.

    Raises:
        CheckpointError: a line in the middle that is not a JSON object.
    """
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for index, line in enumerate(lines):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or "step" not in row:
                raise CheckpointError(
                    "A record of the run is damaged",
                    got=repr(line[:80]),
                    needed="a JSON object with a step",
                    do="Mend or remove the line.",
                    where=f"{file}:{index + 1}",
                )
            yield line, row
