"""What a coordinator refuses before it claims a run directory or starts a process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex_coordinator.options import Options
from rollplex_coordinator.processes.stop import Signals
from rollplex_coordinator.run import run
from rollplex_coordinator.telling import EXIT_ERROR


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
