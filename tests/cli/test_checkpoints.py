"""`rollplex checkpoint`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.checkpoint.folder import Identity, save
from rollplex.cli.app import run


def _fill(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"w" * 1_500_000)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two checkpoints."""
    folder = tmp_path / "runs" / "mine"
    monkeypatch.setenv("ROLLPLEX_RUNS_DIR", str(folder.parent))
    folder.mkdir(parents=True)
    (folder / "journal.sqlite").write_bytes(b"")
    for version in (2, 10):
        identity = Identity(step=version, version=version, digest=f"{version}" * 32, table_hash="t")
        save(folder / "checkpoints" / f"step_{version}", identity, needed_bytes=1, write=_fill, libraries={})
    return folder


def _harm(run_dir: Path) -> Path:
    file = run_dir / "checkpoints/step_10/model.safetensors"
    file.write_bytes(b"x" * 1_500_000)
    return file


def test_the_list_tells_versions_sizes_and_which_is_the_newest(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "list"]) == 0
    place, head, first, second = capsys.readouterr().out.splitlines()
    assert place == str(run_dir / "checkpoints")
    assert head.split()[:2] == ["checkpoint", "version"]
    assert first.split() == ["step_2", "2", "1.5", "2222222222222222"]
    assert second.split() == ["step_10", "10", "1.5", "1010101010101010", "newest"]


def test_a_run_without_checkpoints_says_so(tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run_dir.parent / "other"
    other.mkdir()
    (other / "journal.sqlite").write_bytes(b"")
    assert run(["checkpoint", "list", "other"]) == 0
    assert capsys.readouterr().out == f"{other}: no checkpoint yet\n"
    assert run(["checkpoint", "verify", "other"]) == 1
    assert capsys.readouterr().out == "no checkpoint to verify\n"


def test_whole_checkpoints_verify(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", "mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "ok"]
    assert lines[1].endswith("version 10, 1 files, 1.5 MB")


def test_a_damaged_one_is_named_with_its_file_and_the_exit_code_tells(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _harm(run_dir)
    assert run(["checkpoint", "verify"]) == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith(f"ok   {run_dir}/checkpoints/step_2: ")
    assert bad.startswith(f"BAD  {run_dir}/checkpoints/step_10: The checkpoint does not match its manifest")
    assert "model.safetensors: 1500000 bytes" in bad
    assert run(["checkpoint", "verify", str(run_dir / "checkpoints/step_2")]) == 0
    assert run(["checkpoint", "verify", str(run_dir / "checkpoints/step_10")]) == 1


def test_a_manifest_that_is_gone_is_told_by_both(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "checkpoints/step_2/MANIFEST.json").unlink()
    assert run(["checkpoint", "list"]) == 0
    assert "no readable manifest" in capsys.readouterr().out
    assert run(["checkpoint", "verify", str(run_dir / "checkpoints/step_2")]) == 1
    assert "MANIFEST.json" in capsys.readouterr().out


def test_what_is_neither_run_nor_checkpoint_is_a_usage_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", "nowhere"]) == 2
    assert "There is no such run" in capsys.readouterr().err
