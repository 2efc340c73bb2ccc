"""Fingerprints of files and model folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.checkpoint.fingerprint import file_fingerprint, folder_fingerprint
from rollplex.errors import ModelError


def test_a_changed_byte_or_name_changes_the_fingerprint_of_a_folder(tmp_path: Path) -> None:
    seen: list[str] = []
    for name, content in (("a", b"1"), ("a", b"2"), ("b", b"2")):
        folder = tmp_path / str(len(seen))
        folder.mkdir()
        (folder / name).write_bytes(content)
        seen.append(folder_fingerprint(folder))
    assert len(set(seen)) == 3


def test_hidden_files_and_subfolders_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    before = folder_fingerprint(tmp_path)
    (tmp_path / ".cache").write_bytes(b"1")
    (tmp_path / "training").mkdir()
    (tmp_path / "training/x").write_bytes(b"1")
    assert folder_fingerprint(tmp_path) == before


def test_a_file_has_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_fingerprint(tmp_path / "a").startswith("ba7816bf8f01cfea")


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gone"):
        folder_fingerprint(tmp_path / "gone")
