"""Raw rows of every format, and what is kept in memory while they are read."""

from __future__ import annotations

import builtins
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollplex.data.stores import parquet
from rollplex.data.stores.base import RowStore
from rollplex.data.stores.factory import open_store
from rollplex.data.stores.huggingface import SavedDataset
from rollplex.errors import ConfigError, DataError

Write = Callable[[Path, Sequence[dict[str, Any]]], Path]
PLAIN: list[dict[str, Any]] = [
    {"problem": f"what is {number}?", "answer": str(number), "images": [f"{number}.png"] * (number % 3), "n": number}
    for number in range(7)
]
ROWS: list[dict[str, Any]] = [
    {**row, "images": [{"bytes": bytes([row["n"]]) * 5, "path": name} for name in row["images"]]} for row in PLAIN
]


def write_jsonl(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_lines_named_json(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    return write_jsonl(folder, rows).rename(folder / "lines.json")


def write_json(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / "rows.json"
    path.write_text("\n " + json.dumps(rows, indent=2) + "\n")
    return path


def write_parquet(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=3)
    return path


def write_hub_folder(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / "hub"
    (path / "data").mkdir(parents=True)
    table = pa.Table.from_pylist(list(rows))
    for index, start in enumerate((0, 4)):
        pq.write_table(table.slice(start, 4), path / "data" / f"train-{index:05}-of-00002.parquet", row_group_size=3)
    return path


def write_saved(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    import datasets as package

    datasets: Any = package
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(list(rows)).save_to_disk(str(folder / "saved"), num_shards=2)
    return folder / "saved"


TEXTS = (write_jsonl, write_lines_named_json, write_json)
TABLES = (write_parquet, write_hub_folder, write_saved)


def contents(store: RowStore, numbers: Sequence[int]) -> list[dict[str, Any]]:
    return [store.raw(number) for number in numbers]


@pytest.mark.parametrize("write", [*TEXTS, *TABLES])
def test_rows_are_found_by_number_in_any_order(write: Write, tmp_path: Path) -> None:
    rows = PLAIN if write in TEXTS else ROWS
    store = open_store(write(tmp_path, rows))
    order = [6, 0, 3, 3, 1, 5, 2, 4]
    assert len(store) == 7
    assert contents(store, order) == [rows[number] for number in order]
    for number in (-1, 7):
        with pytest.raises(DataError, match=f"There is no such row; got {number}; needed 0 to 6"):
            store.raw(number)
    store.close()


@pytest.mark.parametrize("write", [*TEXTS, *TABLES])
def test_the_digest_is_of_the_content_and_not_of_place_or_dates(write: Write, tmp_path: Path) -> None:
    digests = []
    for name, rows in (("a", PLAIN), ("b", PLAIN), ("c", PLAIN[::-1])):
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, rows)
        for file in [path, *path.rglob("*")]:
            os.utime(file, (1, 1))
        digests.append(open_store(path).digest)
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 32


@pytest.mark.parametrize("write", [*TEXTS, *TABLES])
def test_a_dataset_that_changes_during_a_run_is_noticed(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN)
    store = open_store(path)
    store.raw(0)
    file = path if path.is_file() else next(iter(sorted([*path.rglob("*.arrow"), *path.rglob("*.parquet")])))
    os.utime(file, (1, 1))
    with pytest.raises(DataError, match="The dataset changed during the run"):
        store.raw(1)


@pytest.mark.parametrize("write", [write_json, *TABLES])
def test_a_row_is_named_by_its_dataset_and_number(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN)
    assert open_store(path).where(3) == f"{path} (row 3)"


@pytest.mark.parametrize("write", TABLES)
def test_values_that_are_bytes_may_be_left_out(write: Write, tmp_path: Path) -> None:
    store = open_store(write(tmp_path, ROWS), binary=False)
    row = store.raw(2)
    assert (row["problem"], row["n"]) == ("what is 2?", 2)
    if store.form == "Parquet":
        assert row["images"] == [{"path": "2.png"}] * 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b'[{"prompt": "a"}, ]', r"a.json: This file is not a JSON array; got JSON is malformed"),
        ("a.json", b'[{"prompt": "a"}', r"not a JSON array; got Input data was truncated"),
        ("a.json", b"[" * 100_000, "not a JSON array"),
        ("a.json", b"[]", "This dataset has no rows; needed at least one"),
        ("a.json", b"", "This dataset has no rows"),
        ("a.parquet", b"PAR1 and what is no table PAR1", r"a.parquet: This Parquet file cannot be read"),
        ("a.parquet", b"", "This Parquet file cannot be read"),
        ("a.csv", b"a,b", "a.csv: This dataset has no known format; got .csv; needed a .jsonl, .json or .parquet file"),
        ("rows", b"{}", "no known format; got no extension"),
    ],
)
def test_a_file_that_holds_no_rows_says_so(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        open_store(tmp_path / name)


@pytest.mark.parametrize(("item", "says"), [(b"3", "not an object"), (b'{"a": "\xff"}', "not JSON")])
def test_one_bad_item_of_an_array_is_an_error_of_that_row(item: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"a": 1}, ' + item + b', {"a": 3}]')
    store = open_store(tmp_path / "a.json")
    with pytest.raises(DataError, match=rf"a.json \(row 1\): This row is {says}"):
        store.raw(1)
    assert store.raw(2) == {"a": 3}


def test_a_folder_without_a_dataset_says_what_it_could_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="This folder holds no dataset; needed state.json or dataset_dict.json"):
        open_store(tmp_path)


def test_a_split_must_be_named_where_there_are_several(tmp_path: Path) -> None:
    import datasets as package

    datasets: Any = package
    datasets.disable_progress_bars()
    saved = tmp_path / "saved"
    parts = {name: datasets.Dataset.from_list(PLAIN[:size]) for name, size in (("train", 5), ("test", 2))}
    datasets.DatasetDict(parts).save_to_disk(str(saved))
    hub = write_hub_folder(tmp_path, PLAIN)
    pq.write_table(pa.Table.from_pylist(PLAIN[:2]), hub / "data" / "test-00000-of-00001.parquet")
    for folder, train in ((saved, 5), (hub, 7)):
        assert (len(open_store(folder, "train")), len(open_store(folder, "test"))) == (train, 2)
        with pytest.raises(DataError, match="several splits; got no data.split; needed one of .*train"):
            open_store(folder)
        with pytest.raises(DataError, match="no such split; got split 'dev'; needed one of .*train"):
            open_store(folder, "dev")


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_saved])
def test_a_split_of_what_has_none_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="This dataset has no splits; got split 'train'. Take data.split out"):
        open_store(write(tmp_path, PLAIN), "train")


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "link.arrow"])
def test_a_dataset_folder_reads_no_file_outside_itself(name: str, tmp_path: Path) -> None:
    folder = write_saved(tmp_path, PLAIN)
    (tmp_path / "secret.arrow").write_bytes(next(folder.glob("*.arrow")).read_bytes())
    (folder / "link.arrow").symlink_to(tmp_path / "secret.arrow")
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": name}]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="out of the image folder|an absolute path"):
        open_store(folder)


@pytest.mark.parametrize(("module", "write"), [("pyarrow", write_parquet), ("datasets", write_saved)])
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    module: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, PLAIN)
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == module:
            raise ModuleNotFoundError(name=name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError) as caught:
        open_store(path)
    assert caught.value.got == f"no module '{module}'"
    assert caught.value.do == "pip install 'rollplex[data]'"


def test_large_row_groups_are_unpacked_once_and_read_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path, ROWS)
    monkeypatch.setattr(parquet, "CACHE_BYTES", 1)
    monkeypatch.setattr(parquet, "SMALL_GROUP_BYTES", 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    store = open_store(path)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("decoded again"))
    assert contents(store, [6, 0, 3, 2]) == [ROWS[number] for number in (6, 0, 3, 2)]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.parquet"]


def test_only_so_many_row_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path, PLAIN)
    monkeypatch.setattr(parquet, "CACHE_BYTES", 2000)
    store = open_store(path)
    assert isinstance(store, parquet.ParquetRows)
    for number in (0, 3, 6, 0, 6, 3):
        assert store.raw(number) == PLAIN[number]
        assert sum(table.nbytes for table in store._kept.values()) < 2000


def test_a_row_group_that_unpacks_to_much_more_than_it_declares_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"prompt": ["x" * 1000] * 5000}), tmp_path / "rows.parquet")
    monkeypatch.setattr(parquet, "MAX_DECODED_BYTES", 10**6)
    with pytest.raises(DataError, match="larger than it declares.*row_group_size=100"):
        open_store(tmp_path / "rows.parquet").raw(0)


def test_a_row_group_too_large_to_decode_is_refused_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 100)
    with pytest.raises(DataError, match="A row group of this Parquet file is too large; .* needed at most 100"):
        open_store(write_parquet(tmp_path, PLAIN))


MEMORY = """
import random, sys
from pathlib import Path
from rollplex.data.stores import huggingface, parquet
from rollplex.data.stores.factory import open_store

parquet.CACHE_BYTES = huggingface.REMAP_BYTES = 4 * 2**20
parquet.SMALL_GROUP_BYTES = 2**20

def kept():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

import pyarrow.parquet
if Path(sys.argv[1]).is_dir():
    huggingface._import_datasets()
before = kept()
store = open_store(Path(sys.argv[1]))
order = list(range(len(store)))
after = []
for epoch in range(3):
    random.Random(epoch).shuffle(order)
    for number in order:
        row = store.raw(number)
        assert row["n"] == number and len(row["images"][0]["bytes"]) == 100_000
    del row
    after.append(kept())
print(before, *after)
"""


@pytest.mark.parametrize("form", ["one row group", "small row groups", "saved"])
def test_memory_stays_flat_over_epochs_of_rows_with_large_images(form: str, tmp_path: Path) -> None:
    noise = random.Random(0)
    rows = [{"n": n, "images": [{"bytes": noise.randbytes(100_000), "path": None}]} for n in range(600)]
    if form == "saved":
        path = write_saved(tmp_path, rows)
    else:
        path = tmp_path / "rows.parquet"
        size = 600 if form == "one row group" else 6
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=size)
    command = [sys.executable, "-c", MEMORY, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    before, *after = [int(word) // 1024 for word in done.stdout.split()]
    # 60 MB of rows; kept are at most 4 MiB of row groups, and what the allocators hold back. Mapped pages do not count.
    assert max(after) - before < 40, (before, after)
    assert after[-1] - after[0] < 12, after


def test_the_mapping_of_a_dataset_folder_is_let_go_each_time_that_much_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapped() -> int:
        """How often a file of the folder is mapped by this process."""
        return Path("/proc/self/maps").read_text().count(str(folder))

    folder = write_saved(tmp_path, ROWS)
    store = open_store(folder)
    assert isinstance(store, SavedDataset)
    loads: list[str] = []
    load = SavedDataset._load

    def count(store: SavedDataset) -> Any:
        loads.append("load")
        return load(store)

    monkeypatch.setattr(SavedDataset, "_load", count)
    monkeypatch.setattr("rollplex.data.stores.huggingface.REMAP_BYTES", 3 * store._row_bytes)
    assert contents(store, list(range(7)) * 4) == ROWS * 4
    assert len(loads) == 6  # a new one before every fifth row
    assert mapped() == 2  # two files, each once


OFFLINE = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append((event, args)) if event.startswith("socket.") else None)
from pathlib import Path
from rollplex.data.stores.factory import open_store
print(open_store(Path(sys.argv[1])).raw(0)["n"], [e for e in seen if e[0] != "socket.__new__"],
      {"torch", "transformers"} & set(sys.modules))
"""


def test_a_dataset_folder_is_read_without_network_and_without_decoding(tmp_path: Path) -> None:
    import datasets

    rows = [{"n": 5, "image": {"bytes": b"no image at all", "path": None}}]
    features = datasets.Features({"n": datasets.Value("int64"), "image": datasets.Image()})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    assert open_store(tmp_path / "saved").raw(0) == rows[0]
    command = [sys.executable, "-c", OFFLINE, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "5 [] set()"
