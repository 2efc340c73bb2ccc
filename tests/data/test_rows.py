"""The form of rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.data.media import Clip
from rollplex.data.rows import Rows
from rollplex.data.stores.base import MAX_ROW_BYTES
from rollplex.data.stores.jsonl import JsonLines
from rollplex.errors import DataError


@pytest.fixture
def rows_of(tmp_path: Path) -> Callable[[bytes], Rows]:
    def make(content: bytes) -> Rows:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        return Rows(path)

    return make


RowsOf = Callable[[bytes], Rows]
GOOD = b'{"prompt": "a"}'


def test_rows_are_found_whatever_the_ends_of_lines(rows_of: RowsOf) -> None:
    rows = rows_of(b'{"prompt": "a"}\r\n{"prompt": "b", "answer": 3}\n{"prompt": "c"}\n \n\r\n')
    assert len(rows) == 3
    assert [rows.row(number).prompt for number in (2, 0, 1)] == ["c", "a", "b"]
    assert rows.row(1).columns == {"answer": 3}


def test_the_last_line_needs_no_end(rows_of: RowsOf) -> None:
    assert [rows_of(GOOD + b"\n" + GOOD).row(number).number for number in range(2)] == [0, 1]


def test_rows_are_found_across_the_chunks_of_a_large_file(rows_of: RowsOf, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{number} {'x' * (number % 977)}"}).encode() for number in range(6000)]
    rows_of(b"\n".join(lines))
    store = JsonLines(tmp_path / "rows.jsonl")
    assert len(store) == 6000
    assert all(store.line(number) == line for number, line in enumerate(lines))


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n\r\n\n"])
def test_an_empty_dataset_is_refused(content: bytes, rows_of: RowsOf) -> None:
    with pytest.raises(DataError, match="no rows"):
        rows_of(content)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "an empty line"),
        (b"{", "not JSON"),
        (b"\xef\xbb\xbf" + GOOD, "byte-order mark"),
        (b"\xff\xfe", "not JSON"),
        (b'{"prompt": NaN}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b"[1]", "not an object"),
        (b"{}", 'no "prompt"'),
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": " \\n"}', "empty"),
        (b'{"prompt": []}', "empty"),
        (b'{"prompt": 3}', "text, or a list"),
        (b'{"prompt": [3]}', "message 0 is not an object"),
        (b'{"prompt": [{"content": "a"}]}', "message 0 has no role"),
        (b'{"prompt": [{"role": "", "content": "a"}]}', "message 0 has no role"),
        (b'{"prompt": [{"role": ["user"], "content": "a"}]}', "message 0 has no role; got a list"),
        (b'{"prompt": [{"role": "User", "content": "a"}]}', "message 0 has an unknown role; got text: 'User'; needed"),
        (b'{"prompt": [{"role": "human", "content": "a"}]}', "message 0 has an unknown role"),
        (b'{"prompt": [{"role": "user"}]}', "message 0 has no content"),
        (b'{"prompt": [{"role": "user", "content": null}]}', "message 0 has no content"),
        (b'{"prompt": [{"role": "user", "content": " "}]}', "empty"),
        (b'{"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}', "'audio'"),
        (b'{"prompt": [{"role": "user", "content": ["a"]}]}', "part 0 is of no known type"),
        (b'{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}', "no text"),
        (b'{"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}', "names its file"),
        (b'{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "assistant's"),
        (b'{"prompt": "a", "images": 3}', '"images" has the wrong form'),
        (b'{"prompt": "a", "images": [3]}', '"images"[0] has the wrong form'),
        (b'{"prompt": "a", "images": ["a.png", null]}', '"images"[1] is empty'),
        (b'{"prompt": "a", "image": {"url": "a.png"}}', '"image" has the wrong form'),
        (b'{"prompt": "a", "image": "a.png", "images": ["a.png"]}', "both"),
        (b'{"prompt": "a", "videos": 3}', "wrong form"),
        (b'{"prompt": "a", "videos": [{"video": "a.mp4", "nframes": 3}]}', "wrong form"),
        (b'{"prompt": "a", "videos": [["a.png"], []]}', "videos[1] is empty"),
        (b'{"prompt": "a", "videos": [["a.png"]], "video_fps": [1, 2]}', "does not fit"),
        (b'{"prompt": "a", "videos": [["a.png"]], "video_fps": 0}', "0.001"),
        (b'{"prompt": "a", "videos": [["a.png"]], "video_fps": true}', "0.001"),
        (b'{"prompt": "a", "completions": ["b"]}', "'completions'"),
    ],
)
def test_a_row_of_the_wrong_form_is_refused_by_line_and_number(line: bytes, says: str, rows_of: RowsOf) -> None:
    rows = rows_of(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(DataError) as caught:
        rows.row(1)
    assert says in str(caught.value)
    assert str(caught.value).count("rows.jsonl:2 (row 1)") == 1
    assert rows.row(2).prompt == "a"


@pytest.mark.parametrize(
    ("name", "do"),
    [
        ("mesages", 'Rename "mesages" to "messages", or set data.columns: {messages: mesages}.'),
        ("promtp", 'Rename "promtp" to "prompt", or set data.columns: {prompt: promtp}.'),
        ("Prompt", 'Rename "Prompt" to "prompt", or set data.columns: {prompt: Prompt}.'),
        ("question", "Set data.columns, e.g. {prompt: question}, or data.shape."),
    ],
)
def test_a_dataset_without_prompts_is_told_of_a_column_that_may_hold_them(name: str, do: str, rows_of: RowsOf) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1 \(row 0\): The columns fit no known shape") as caught:
        rows_of(b'{"%s": "a"}' % name.encode())
    assert caught.value.do == do


def test_a_row_without_prompt_is_told_of_a_column_that_may_be_one(rows_of: RowsOf) -> None:
    with pytest.raises(DataError, match='no "prompt"') as caught:
        rows_of(GOOD + b'\n{"promtp": "a"}').row(1)
    assert caught.value.do == 'Rename "promtp" to "prompt".'


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b"\n")
        file.truncate(MAX_ROW_BYTES + 100)
        file.seek(0, os.SEEK_END)
        file.write(b"}")
    with pytest.raises(DataError, match="too long"):
        Rows(path).row(1)


def test_media_columns_are_read(rows_of: RowsOf) -> None:
    rows = rows_of(
        b'{"prompt": "a", "image": "x.png", "videos": [["1.png", "2.png"], ["3.png"]], "video_fps": 4}\n'
        b'{"prompt": "a", "images": null, "videos": [["1.png"]], "n": {"deep": [1]}}'
    )
    first, second = rows.row(0), rows.row(1)
    assert first.images == ("x.png",)
    assert first.videos == (Clip(frames=("1.png", "2.png"), fps=4.0), Clip(frames=("3.png",), fps=4.0))
    assert (second.images, second.videos) == ((), (Clip(frames=("1.png",), fps=2.0),))
    assert first.columns["image"] == "x.png"
    assert second.columns["n"] == {"deep": [1]}


def test_a_dataset_that_changes_during_a_run_is_noticed(rows_of: RowsOf, tmp_path: Path) -> None:
    rows = rows_of(GOOD + b"\n" + GOOD)
    with (tmp_path / "rows.jsonl").open("ab") as file:
        file.write(GOOD)
    with pytest.raises(DataError, match="changed during the run"):
        rows.row(0)


def test_a_dataset_that_is_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="a FIFO"):
        Rows(tmp_path / "fifo")
    with pytest.raises(DataError, match="No such file"):
        Rows(tmp_path / "absent.jsonl")


def test_there_is_no_row_behind_the_last(rows_of: RowsOf) -> None:
    for number in (-1, 1):
        with pytest.raises(DataError, match="no such row"):
            rows_of(GOOD).row(number)
