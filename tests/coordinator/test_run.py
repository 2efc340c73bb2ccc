"""What a coordinator refuses before it claims a run directory or starts a process."""

from __future__ import annotations

import json
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.checkpoint.folder import Identity, folders, latest, save
from rollplex.checkpoint.state import STATE_FILE, RunState, encode
from rollplex.config.loading import dump, load
from rollplex_coordinator.options import Options, ResumeOptions
from rollplex_coordinator.processes.stop import Signals
from rollplex_coordinator.run import run
from rollplex_coordinator.telling import EXIT_CONFIG, EXIT_ERROR


def other_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_vl"}))


def own_code(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))


def pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def half_downloaded(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (other_architecture, "got model_type 'qwen3_vl'; needed qwen2_5_vl or qwen2_vl"),
        (own_code, "wants its own code run, which Rollplex never does"),
        (pickled, "got pytorch_model.bin; needed model.safetensors"),
        (half_downloaded, "model.safetensors: a weight file cannot be read"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_model_that_no_run_could_start_from_is_refused_before_anything_starts(
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    says: str,
    dry_run: bool,
) -> None:
    spoil(Path(shutil.copytree(model_folder, tmp_path / "model")))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "answer": "1"}\n' * 4)
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {path: model}\n"
        "data: {path: rows.jsonl, prompts_per_iteration: 1}\n"
        "rewards: {functions: [{function: 'rollplex.demo.rewards:right'}]}\n"
    )
    options = Options(
        config=config,
        run_dir=tmp_path / "run",
        iterations=1,
        serve=False,
        external_workers=False,
        die_with_parent=False,
        dry_run=dry_run,
    )
    assert run(options, Signals(read_fd=-1, write_fd=-1, received=[])) == EXIT_ERROR
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_too_few_files_are_refused_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    options = Options(
        config=tmp_path / "none.yaml",
        run_dir=tmp_path / "run",
        iterations=1,
        serve=False,
        external_workers=False,
        die_with_parent=False,
    )
    assert run(options, Signals(read_fd=-1, write_fd=-1, received=[])) == EXIT_CONFIG
    assert "may not hold enough files open; got at most 64" in capsys.readouterr().err


def test_a_resumption_that_ends_before_anything_starts_leaves_records_and_checkpoints_as_they_were(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "answer": "1"}\n' * 4)
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {{path: {model_folder}}}\n"
        "data: {path: rows.jsonl, prompts_per_iteration: 1}\n"
        "rewards: {functions: [{function: 'rollplex.demo.rewards:right'}]}\n"
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    (run_dir / "config.yaml").write_text("as it was")
    for step in (1, 2):
        state = RunState(step=step, version=step, seed=0, table_hash="t", config=dump(load(file)), fingerprints={})
        _save(run_dir, state)
    records = "".join(f'{{"step": {step}}}\n' for step in range(3))
    (run_dir / "metrics.jsonl").write_text(records)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = Options(
            config=file,
            run_dir=run_dir,
            iterations=9,
            serve=False,
            external_workers=False,
            die_with_parent=False,
            overrides=(f"http.port={taken.getsockname()[1]}",),
            resume=ResumeOptions(checkpoint=run_dir / "checkpoints/step_1"),
        )
        assert run(options, Signals(read_fd=-1, write_fd=-1, received=[])) != 0
    said = capsys.readouterr().err
    assert "goes on after 1 iterations" in said
    assert "port" in said
    assert (run_dir / "metrics.jsonl").read_text() == records
    assert (run_dir / "config.yaml").read_text() == "as it was"
    assert [folder.name for folder in folders(run_dir / "checkpoints")] == ["step_1", "step_2"]
    assert latest(run_dir / "checkpoints") == run_dir / "checkpoints/step_2"


@pytest.mark.parametrize("steps", [(), (2,), (2, 5)])
def test_a_run_that_may_resume_begins_where_there_is_no_checkpoint_and_goes_on_where_there_is(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: tuple[int, ...]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "answer": "1"}\n' * 4)
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {{path: {model_folder}}}\n"
        "data: {path: rows.jsonl, prompts_per_iteration: 1}\n"
        "rewards: {functions: [{function: 'rollplex.demo.rewards:right'}]}\n"
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    for step in steps:
        state = RunState(step=step, version=step, seed=0, table_hash="t", config=dump(load(file)), fingerprints={})
        _save(run_dir, state)
    with socket.socket() as taken:  # so that the run ends before it starts anything
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = Options(
            config=file,
            run_dir=run_dir,
            iterations=0 if len(steps) < 2 else 3,  # fewer than it has: it waits, since it serves
            serve=True,
            external_workers=False,
            die_with_parent=False,
            overrides=(f"http.port={taken.getsockname()[1]}",),
            resume=ResumeOptions(if_any=True),
        )
        assert run(options, Signals(read_fd=-1, write_fd=-1, received=[])) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert "port" in said
    assert ("goes on after" in said) == bool(steps)
    assert not steps or f"goes on after {steps[-1]} iterations" in said


def test_a_tracker_that_is_not_installed_is_refused_before_the_run_directory_is_made(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "answer": "1"}\n')
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {{path: {model_folder}}}\n"
        "data: {path: rows.jsonl}\n"
        "rewards: {functions: [{function: 'rollplex.demo.rewards:right'}]}\n"
        "trackers: {mlflow: {}}\n"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = Options(
        config=file, run_dir=tmp_path / "run", iterations=1, serve=False, external_workers=False, die_with_parent=False
    )
    assert run(options, Signals(read_fd=-1, write_fd=-1, received=[])) == EXIT_CONFIG
    assert "pip install 'rollplex[mlflow]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def _save(run_dir: Path, state: RunState) -> None:
    def write(inner: Path) -> None:
        (inner / "training").mkdir()
        (inner / STATE_FILE).write_text(encode(state), encoding="utf-8")

    identity = Identity(step=state.step, version=state.version, digest="x", table_hash="t")
    folder = run_dir / "checkpoints" / f"step_{state.step}"
    save(folder, identity, needed_bytes=1, write=write, libraries={})
