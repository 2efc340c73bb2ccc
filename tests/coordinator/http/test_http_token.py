from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rollplex.errors import ConfigError
from rollplex_coordinator.http.token import create_or_read


def test_a_token_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = create_or_read(path)
    assert len(token) >= 43, "32 random bytes"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert create_or_read(path) == token
    assert [file.name for file in tmp_path.iterdir()] == ["token"]
    assert create_or_read(tmp_path / "another") != token


def test_a_loose_umask_opens_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create_or_read(tmp_path / "token")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o666])
def test_a_file_that_others_can_open_is_refused_without_telling_the_token(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    token = create_or_read(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="open to others") as refused:
        create_or_read(path)
    assert token not in str(refused.value)


@pytest.mark.parametrize("text", ["", "short", "x" * 31, "a b" * 20, "\xe9" * 40, "x" * 20 + "\n" + "y" * 20])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no token"):
        create_or_read(path)


def test_a_link_and_a_pipe_are_refused(tmp_path: Path) -> None:
    create_or_read(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(ConfigError, match="token"):
            create_or_read(tmp_path / name)
    assert not (tmp_path / "nothing").exists()


def test_a_folder_that_is_missing_is_an_error_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        create_or_read(tmp_path / "nowhere" / "token")
