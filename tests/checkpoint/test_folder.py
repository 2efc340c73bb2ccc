"""Checkpoint folders under crashes, full disks and tampering."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollplex.checkpoint import folder as checkpoint
from rollplex.checkpoint.folder import Identity, folders, latest, newest_valid, save, verify
from rollplex.errors import CheckpointError

LIBRARIES = {"torch": "2"}


def identity(version: int) -> Identity:
    return Identity(step=version, version=version, digest=f"digest-{version}", table_hash="table")


def fill(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"w" * 5000)
    (folder / "config.json").write_text("{}")
    (folder / "training").mkdir()
    (folder / "training" / "state.json").write_text('{"position": 3}')


def save_version(parent: Path, version: int, write: Callable[[Path], None] = fill) -> int:
    return save(parent / f"step_{version}", identity(version), needed_bytes=6000, write=write, libraries=LIBRARIES)


def test_a_saved_folder_verifies_and_latest_names_it(tmp_path: Path) -> None:
    size = save_version(tmp_path, 1)
    manifest = verify(tmp_path / "step_1")
    assert manifest.identity == identity(1)
    assert manifest.libraries == LIBRARIES
    assert list(manifest.files) == ["config.json", "model.safetensors", "training/state.json"]
    assert size == 5000 + 2 + 15
    assert latest(tmp_path) == tmp_path / "step_1"
    save_version(tmp_path, 2)
    assert latest(tmp_path) == tmp_path / "step_2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step_1", "step_2"]


def test_every_file_and_folder_is_on_disk_before_the_name_that_promises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[str] = []

    def told(what: str, real: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            story.append(f"{what} {name(*args)}")
            return real(*args, **kwargs)

        return call

    def of_descriptor(fd: int) -> str:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        inside = [p for p in path.relative_to(tmp_path).parts if not p.startswith(".tmp-step")]
        return "TMP/" + "/".join(inside) if ".tmp-step" in str(path) else "/".join(inside) or "PARENT"

    monkeypatch.setattr(os, "fsync", told("fsync", os.fsync, of_descriptor))
    monkeypatch.setattr(Path, "rename", told("rename", Path.rename, lambda _, target: target.name))
    monkeypatch.setattr(Path, "replace", told("replace", Path.replace, lambda _, target: target.name))
    save_version(tmp_path, 1)
    assert story[:3] == ["fsync TMP/config.json", "fsync TMP/model.safetensors", "fsync TMP/training/state.json"]
    assert story[3:8] == [
        "fsync TMP/MANIFEST.json",
        "fsync TMP/training",
        "fsync TMP/",
        "rename step_1",
        "fsync PARENT",
    ]
    assert story[8].startswith("fsync .tmp-LATEST-")
    assert story[9:] == ["replace LATEST", "fsync PARENT"]


def test_nothing_that_has_its_final_name_is_opened_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_version(tmp_path, 1)
    written: list[Path] = []
    real = Path.open

    def watched(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "r" not in mode:
            written.append(path)
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", watched)
    save_version(tmp_path, 2)
    assert len(written) >= 2
    assert all(path.relative_to(tmp_path).parts[0].startswith(".tmp-") for path in written)


class Crash(BaseException):
    """Not an Exception: nothing may catch it."""


def crash_points(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], *, at: int) -> list[int]:
    """Let call number `at` of everything that touches the disk do `act` instead. Returns the counter."""
    calls = [0]

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                act()
            return real(*args, **kwargs)

        return call

    for owner, name in (
        (os, "fsync"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "mkdir"),
        (Path, "open"),
        (os, "open"),
        (shutil, "disk_usage"),
    ):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    return calls


def count_points(tmp_path: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        calls = crash_points(patch, lambda: None, at=-1)
        save_version(tmp_path, 2)
    shutil.rmtree(tmp_path / "step_2")
    (tmp_path / "LATEST").write_text("step_1\n")
    return calls[0]


def assert_previous_or_new(parent: Path) -> None:
    newest = latest(parent)
    assert newest is not None
    verify(newest)
    verify(parent / "step_1")
    if newest.name == "step_1" and (parent / "step_2").exists():
        verify(parent / "step_2")


def test_an_exception_at_any_point_leaves_latest_valid_and_nothing_half_written(tmp_path: Path) -> None:
    save_version(tmp_path, 1)

    def raise_crash() -> None:
        raise Crash

    for point in range(1, count_points(tmp_path) + 1):
        with pytest.MonkeyPatch.context() as patch:
            crash_points(patch, raise_crash, at=point)
            with pytest.raises(Crash):
                save_version(tmp_path, 2)
        assert_previous_or_new(tmp_path)
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-")]
        shutil.rmtree(tmp_path / "step_2", ignore_errors=True)
        (tmp_path / "LATEST").write_text("step_1\n")


def test_sigkill_at_any_point_leaves_latest_valid_and_the_next_save_cleans_up(tmp_path: Path) -> None:
    save_version(tmp_path, 1)
    left_behind = 0
    for point in range(1, count_points(tmp_path) + 1):
        child = os.fork()
        if child == 0:
            crash_points(pytest.MonkeyPatch(), lambda: os.kill(os.getpid(), signal.SIGKILL), at=point)
            save_version(tmp_path, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert_previous_or_new(tmp_path)
        left_behind += sum(p.name.startswith(".tmp-") for p in tmp_path.iterdir())
        save_version(tmp_path, 2)
        assert latest(tmp_path) == tmp_path / "step_2"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step_1", "step_2"]
        shutil.rmtree(tmp_path / "step_2")
        (tmp_path / "LATEST").write_text("step_1\n")
    assert left_behind > 3


def test_a_failing_writer_leaves_the_previous_checkpoint_and_no_other(tmp_path: Path) -> None:
    save_version(tmp_path, 1)

    def full_disk(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        save_version(tmp_path, 2, full_disk)
    assert latest(tmp_path) == tmp_path / "step_1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step_1"]


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(CheckpointError, match="Too little space"):
        save(tmp_path / "step_1", identity(1), needed_bytes=free, write=lambda _: pytest.fail("wrote"), libraries={})
    assert list(tmp_path.iterdir()) == []


def test_saving_the_same_checkpoint_twice_keeps_the_first(tmp_path: Path) -> None:
    first = save_version(tmp_path, 1)
    (tmp_path / "LATEST").unlink()
    assert save_version(tmp_path, 1, lambda _: pytest.fail("written again")) == first
    assert latest(tmp_path) == tmp_path / "step_1"


def test_a_manifest_copied_from_the_starting_folder_is_replaced(tmp_path: Path) -> None:
    def copy_all(folder: Path) -> None:
        fill(folder)
        (folder / "MANIFEST.json").write_text("of another folder")

    save_version(tmp_path, 1, copy_all)
    assert "MANIFEST.json" not in verify(tmp_path / "step_1").files


def test_another_checkpoint_in_the_way_is_refused_and_kept(tmp_path: Path) -> None:
    save_version(tmp_path, 1)
    with pytest.raises(CheckpointError, match="Another checkpoint"):
        save(tmp_path / "step_1", identity(2), needed_bytes=1, write=fill, libraries={})
    assert verify(tmp_path / "step_1").identity == identity(1)


def flip_bit(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[100] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def link_file(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere.json")


def edit_manifest(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / "MANIFEST.json").read_text()
        assert old in text
        (folder / "MANIFEST.json").write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (flip_bit, "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"w" * 4999), "4999 bytes"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "extra.bin").write_bytes(b"x"), "extra.bin"),
        (link_file, "config.json is neither file nor folder"),
        (edit_manifest('"config.json"', '"../config.json"'), r"\.\./config.json"),
        (edit_manifest('"format": 2', '"format": 3'), "format 3"),
        (edit_manifest('"digest"', '"digset"'), "digset"),
        (lambda folder: (folder / "MANIFEST.json").write_text("[" * 100_000), "ValidationError"),
        (lambda folder: (folder / "MANIFEST.json").unlink(), "No such file"),
    ],
)
def test_tampering_is_named(tmp_path: Path, tamper: Callable[[Path], object], says: str) -> None:
    save_version(tmp_path, 1)
    tamper(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match=says):
        verify(tmp_path / "step_1")


@pytest.mark.parametrize("content", ["", "..", ".", "../elsewhere", "/etc", "step_9"])
def test_latest_that_names_no_folder_beside_it_is_refused(tmp_path: Path, content: str) -> None:
    assert latest(tmp_path) is None
    (tmp_path / checkpoint.LATEST).write_text(content)
    with pytest.raises(CheckpointError, match="LATEST"):
        latest(tmp_path)


def test_leftovers_are_removed_without_following_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    parent = tmp_path / "checkpoints"
    parent.mkdir()
    (parent / f".tmp-step_1-{'0' * 32}").symlink_to(precious)
    (parent / ".tmp-of-somebody-else").write_text("keep")
    save_version(parent, 1)
    assert (precious / "file").read_text() == "keep"
    assert sorted(p.name for p in parent.iterdir()) == [".tmp-of-somebody-else", "LATEST", "step_1"]


def test_checkpoints_are_ordered_by_their_number_and_nothing_else_counts(tmp_path: Path) -> None:
    for version in (9, 10, 2):
        save_version(tmp_path, version)
    (tmp_path / "step_11").symlink_to(tmp_path / "step_2")
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_12").write_text("a file")
    assert [folder.name for folder in folders(tmp_path)] == ["step_2", "step_9", "step_10"]
    assert folders(tmp_path / "none") == ()


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


def _swap(folder: Path) -> None:
    first, second = folder / "model.safetensors", folder / "config.json"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _escape(folder: Path) -> None:
    manifest = folder / checkpoint.MANIFEST
    manifest.write_text(manifest.read_text().replace('"config.json"', '"../config.json"'))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda folder: _flip(folder / "model.safetensors"), "model.safetensors"),
        (lambda folder: os.truncate(folder / "model.safetensors", 4999), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (_swap, "config.json"),
        (_escape, "../config.json"),
        (lambda folder: (folder / "extra.pkl").write_bytes(b"x"), "extra.pkl"),
        (lambda folder: (folder / checkpoint.MANIFEST).unlink(), "MANIFEST.json"),
    ],
)
def test_the_newest_good_checkpoint_is_found_and_the_damaged_one_is_named(
    tmp_path: Path, harm: Callable[[Path], object], named: str
) -> None:
    for version in (1, 2):
        save_version(tmp_path, version)
    harm(tmp_path / "step_2")
    found, rejected = newest_valid(tmp_path)
    assert found is not None
    assert found[0] == tmp_path / "step_1"
    assert found[1].identity == identity(1)
    (bad,) = rejected
    assert bad.folder == tmp_path / "step_2"
    assert named in str(bad.error)


def test_without_a_good_checkpoint_all_are_named(tmp_path: Path) -> None:
    for version in (1, 2):
        save_version(tmp_path, version)
        _flip(tmp_path / f"step_{version}" / "model.safetensors")
    found, rejected = newest_valid(tmp_path)
    assert found is None
    assert [bad.folder.name for bad in rejected] == ["step_2", "step_1"]
