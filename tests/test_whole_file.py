"""A file takes its name when it is whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.whole_file import whole_file, write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_what_had_the_name_keeps_it_until_all_is_written(tmp_path: Path, *, durable: bool) -> None:
    path = tmp_path / "http.json"
    with whole_file(path, durable=durable) as file:
        file.write(b"first")
        assert not path.exists()
    assert path.read_bytes() == b"first"
    with whole_file(path, durable=durable) as file:
        file.write(b"sec")
        file.flush()
        assert path.read_bytes() == b"first"
        file.write(b"ond")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_file_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_whole(path, b"old")
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines([b"ne", None])  # type: ignore[list-item]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_do_not_use_one_draft(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    with whole_file(path) as first, whole_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"  # the outer one ends last
