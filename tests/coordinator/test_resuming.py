"""Going on from a checkpoint: which one, whether it may be, and the records cut back to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from rollplex.checkpoint.folder import Identity, latest, save
from rollplex.checkpoint.state import STATE_FILE, RunState, encode
from rollplex.config.config import Config
from rollplex.config.loading import dump, from_mapping
from rollplex.errors import CheckpointError, ConfigError
from rollplex_coordinator.options import ResumeOptions
from rollplex_coordinator.resuming import (
    Resumption,
    choose,
    evaluated,
    judge_config,
    judge_fingerprints,
    judge_libraries,
    resume,
    set_back,
    undo,
    wanted_before,
)


def _config(tmp_path: Path, **run: object) -> Config:
    return from_mapping(
        {
            "run": {"iterations": 6, **run},
            "model": {"path": str(tmp_path / "model")},
            "data": {"path": str(tmp_path / "rows.jsonl")},
            "rewards": {"functions": [{"function": "a.b:c"}]},
            "eval": [
                {"name": "often", "data": str(tmp_path / "a.jsonl"), "every": 3},
                {"name": "last", "data": str(tmp_path / "b.jsonl")},
            ],
        }
    )


def _state(tmp_path: Path, step: int) -> RunState:
    return RunState(
        step=step,
        version=step,
        seed=0,
        table_hash="t",
        config=dump(_config(tmp_path)),
        fingerprints={"data.train": "d", "model": "m"},
    )


def _save(run_dir: Path, state: RunState, *, named: int | None = None) -> Path:
    folder = run_dir / "checkpoints" / f"step_{state.step if named is None else named}"

    def write(inner: Path) -> None:
        (inner / "model.safetensors").write_bytes(b"w")
        (inner / "training").mkdir()
        (inner / STATE_FILE).write_text(encode(state), encoding="utf-8")

    identity = Identity(step=state.step, version=state.version, digest="x", table_hash="t")
    save(folder, identity, needed_bytes=1, write=write, libraries={"torch": "2"})
    return folder


def _lines(file: Path, *rows: Mapping[str, object]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _read(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_newest_good_checkpoint_is_taken_and_why_a_newer_one_is_not(tmp_path: Path) -> None:
    for step in (2, 4):
        _save(tmp_path, _state(tmp_path, step))
    assert choose(tmp_path, None).folder.name == "step_4"
    (tmp_path / "checkpoints/step_4/model.safetensors").write_bytes(b"x")
    chosen = choose(tmp_path, None)
    assert (chosen.folder.name, chosen.state.step, chosen.manifest.identity.version) == ("step_2", 2, 2)
    (why,) = chosen.passed_over
    assert why.startswith("step_4 is not used: ")
    assert "model.safetensors" in why


def test_a_named_checkpoint_is_taken_or_refused_never_replaced(tmp_path: Path) -> None:
    for step in (2, 4):
        _save(tmp_path, _state(tmp_path, step))
    assert choose(tmp_path, tmp_path / "checkpoints/step_2").state.step == 2
    (tmp_path / "checkpoints/latest").symlink_to("step_4")
    assert choose(tmp_path, tmp_path / "checkpoints/latest").folder.name == "step_4"
    (tmp_path / "checkpoints/step_2/model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        choose(tmp_path, tmp_path / "checkpoints/step_2")
    with pytest.raises(CheckpointError, match="not one of the run"):
        choose(tmp_path, tmp_path / "elsewhere/step_2")


def test_without_a_good_checkpoint_nothing_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to go on from; got none at all"):
        choose(tmp_path, None)
    folder = _save(tmp_path, _state(tmp_path, 2))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="got step_2 is not used: .*model.safetensors"):
        choose(tmp_path, None)


def test_a_state_that_is_not_of_these_weights_is_refused(tmp_path: Path) -> None:
    state = msgspec.structs.replace(_state(tmp_path, 2), version=1)
    folder = tmp_path / "checkpoints/step_2"

    def write(inner: Path) -> None:
        (inner / "training").mkdir()
        (inner / STATE_FILE).write_text(encode(state), encoding="utf-8")

    save(folder, Identity(step=2, version=2, digest="x", table_hash="t"), needed_bytes=1, write=write, libraries={})
    with pytest.raises(CheckpointError, match="got step 2, version 1; needed step 2, version 2"):
        choose(tmp_path, None)


@pytest.fixture
def resumption(tmp_path: Path) -> Resumption:
    _save(tmp_path, _state(tmp_path, 3))
    return choose(tmp_path, None)


def test_the_same_configuration_goes_on_without_a_word(tmp_path: Path, resumption: Resumption) -> None:
    assert judge_config(resumption, _config(tmp_path), ()) == ()


def test_another_seed_is_refused_with_the_key_and_both_values(tmp_path: Path, resumption: Resumption) -> None:
    with pytest.raises(ConfigError) as raised:
        judge_config(resumption, _config(tmp_path, seed=7), ())
    assert str(raised.value) == (
        "This would not be the same run any more; got run.seed: was 0, now 7; needed what changes the result as it "
        "was. Undo the change, start a new run, or accept it: --accept run.seed"
    )
    assert judge_config(resumption, _config(tmp_path, seed=7), ["run.seed"]) == (
        "not as it was: run.seed: was 0, now 7",
    )


def test_another_schedule_is_told(tmp_path: Path, resumption: Resumption) -> None:
    assert judge_config(resumption, _config(tmp_path, schedule="serial"), ()) == (
        "not as it was: run.schedule: was 'overlap', now 'serial'",
    )


def test_other_data_or_model_files_are_refused_and_other_libraries_told(resumption: Resumption) -> None:
    same = {"data.train": "d", "model": "m"}
    assert judge_fingerprints(resumption, same, ()) == ()
    assert judge_libraries(resumption, {"torch": "2"}) == ()
    for change in ({"data.train": "e"}, {"model": "n"}, {"reward.right": "new"}):
        with pytest.raises(ConfigError, match=f"--accept {next(iter(change))}"):
            judge_fingerprints(resumption, {**same, **change}, ())
    assert judge_libraries(resumption, {"torch": "3"}) == ("not as it was: version of torch: was 2, now 3",)


def test_records_are_those_of_the_moment_and_the_rest_is_kept_aside(tmp_path: Path, resumption: Resumption) -> None:
    newer = _save(tmp_path, _state(tmp_path, 5))
    (tmp_path / "journal.sqlite").write_text("j")
    (tmp_path / "journal.sqlite-wal").write_text("w")
    (tmp_path / "logs").mkdir()
    _lines(tmp_path / "metrics.jsonl", *({"step": step} for step in range(5)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # cut short by a crash
    evals: list[dict[str, object]] = [
        {"name": name, "step": step}
        for name, step in (("often", 0), ("often", 3), ("last", 3), ("often", 6), ("last", 6))
    ]
    _lines(tmp_path / "eval.jsonl", *evals)
    answers: list[dict[str, object]] = [
        {"source": "train", "step": 2},
        {"source": "train", "step": 3},
        {"source": "often", "step": 3},
        {"source": "last", "step": 3},
        {"source": "often", "step": 6},
    ]
    _lines(tmp_path / "completions.jsonl", *answers)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "samples").mkdir()
    for name in ("step_0.html", "step_2.json", "step_3.html", "step_3.json", "step_10.html", "notes"):
        (tmp_path / "samples" / name).write_text(name)

    attempt = set_back(tmp_path, resumption, _config(tmp_path))

    assert attempt == tmp_path / "attempts/1"
    assert [row["step"] for row in _read(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert _read(tmp_path / "eval.jsonl") == evals[:2]
    assert _read(tmp_path / "completions.jsonl") == [answers[0], answers[2]]
    assert (attempt / "metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in attempt.iterdir()) == [
        "checkpoints",
        "completions.jsonl",
        "eval.jsonl",
        "journal.sqlite",
        "journal.sqlite-wal",
        "logs",
        "metrics.jsonl",
        "samples",
    ]
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {"step_0.html", "step_2.json", "notes"}
    moved = {path.name for path in (attempt / "samples").iterdir()}
    assert moved == {"step_3.html", "step_3.json", "step_10.html"}
    assert not newer.exists()
    assert (attempt / "checkpoints/step_5").is_dir()
    assert latest(tmp_path / "checkpoints") == resumption.folder
    assert (tmp_path / "checkpoints/latest").resolve() == resumption.folder
    assert evaluated(tmp_path) == {("often", 0), ("often", 3)}


def test_records_that_need_no_cut_are_not_touched(tmp_path: Path, resumption: Resumption) -> None:
    _lines(tmp_path / "metrics.jsonl", *({"step": step} for step in range(3)))
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    (tmp_path / "checkpoints/latest").symlink_to("step_9")  # which somebody removed
    attempt = set_back(tmp_path, resumption, _config(tmp_path))
    assert (tmp_path / "checkpoints/latest").resolve() == resumption.folder
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode
    assert list(attempt.iterdir()) == []


def test_a_damaged_line_is_named(tmp_path: Path, resumption: Resumption) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2: A record of the run is damaged; got b'nonsense"):
        set_back(tmp_path, resumption, _config(tmp_path))


def _always(wanted: int | None) -> Callable[[RunState], int | None]:
    return lambda _: wanted


def test_resuming_tells_what_it_does_and_moves_nothing_when_it_refuses(tmp_path: Path) -> None:
    _save(tmp_path, _state(tmp_path, 3))
    _lines(tmp_path / "metrics.jsonl", *({"step": step} for step in range(5)))
    said: list[str] = []
    for config, wanted in ((_config(tmp_path, seed=7), 6), (_config(tmp_path), 3)):
        with pytest.raises(ConfigError):
            resume(tmp_path, ResumeOptions(), config, _always(wanted), said.append)
    assert not (tmp_path / "attempts").exists()
    options = ResumeOptions(accepted=("run.seed",))
    resumption = resume(tmp_path, options, _config(tmp_path, seed=7), _always(None), said.append)
    assert said == [
        "warning: not as it was: run.seed: was 0, now 7",
        f"rollplex: goes on after 3 iterations, from {resumption.folder}; what came later is in {tmp_path}/attempts/1",
    ]
    restore = resumption.restore
    assert (restore.folder, restore.version, restore.digest) == (str(resumption.folder), 3, "x")


def test_an_attempt_that_came_to_nothing_hides_nothing_from_the_next_one(
    tmp_path: Path, resumption: Resumption
) -> None:
    newer = _save(tmp_path, _state(tmp_path, 5))
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_4.json").write_text("{}")
    (tmp_path / "journal.sqlite").write_text("j")
    for name in ("metrics.jsonl", "eval.jsonl", "completions.jsonl"):
        _lines(tmp_path / name, *({"step": step, "source": "train", "name": "often"} for step in range(5)))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    attempt = set_back(tmp_path, resumption, _config(tmp_path))
    assert len(_read(tmp_path / "metrics.jsonl")) == 3
    undo(tmp_path, attempt)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")} == before
    assert (tmp_path / "samples/step_4.json").is_file()
    assert newer.is_dir()
    assert latest(tmp_path / "checkpoints") == newer
    assert (tmp_path / "checkpoints/latest").resolve() == newer.resolve()
    assert choose(tmp_path, None).folder == newer
    assert (attempt / "journal.sqlite").is_file()


def test_a_checkpoint_is_one_of_the_run_by_whatever_path(tmp_path: Path, resumption: Resumption) -> None:
    link = tmp_path.parent / f"{tmp_path.name}-latest"
    link.symlink_to(tmp_path)
    for place in (link / "checkpoints/step_3", tmp_path / "checkpoints/../checkpoints/step_3"):
        assert choose(tmp_path, place).folder == resumption.folder


def test_a_run_goes_as_far_as_it_was_to_go_unless_that_was_reached_or_the_number_was_changed(tmp_path: Path) -> None:
    state = msgspec.structs.replace(_state(tmp_path, 3), wanted=9)
    assert wanted_before(state, _config(tmp_path)) == 9
    assert wanted_before(state, _config(tmp_path, iterations=20)) == 20
    assert wanted_before(msgspec.structs.replace(state, wanted=3), _config(tmp_path)) == 6
    assert wanted_before(msgspec.structs.replace(state, wanted=0), _config(tmp_path)) == 6
