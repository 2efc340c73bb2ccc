from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollplex.errors import JournalError
from rollplex.journal.events import CheckpointSaved, IterationStarted, JournalReplaced, UpdateBegin, UpdateCommitted
from rollplex.journal.reader import Reader, Row
from rollplex_coordinator.records.journal import MAX_BUFFERED, Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def started(step: int) -> IterationStarted:
    return IterationStarted(step=step, version=step, rows=(step,))


def steps_on_disk(path: Path) -> list[int | None]:
    with Reader(path) as reader:
        return [record.step for record in reader.events_after(0, 1_000_000)]


def test_an_appended_event_is_seen_by_readers_once_it_is_flushed(path: Path) -> None:
    with Journal(path) as journal, Reader(path) as reader:
        assert journal.append(started(1)) == 1
        assert reader.events_after(0, 10) == []
        journal.flush()
        (record,) = reader.events_after(0, 10)
        assert (record.id, record.step, record.event) == (1, 1, started(1))
        assert reader.last_id() == journal.last_id == 1


def test_a_durable_event_writes_everything_before_it_in_its_own_order(path: Path) -> None:
    with Journal(path) as journal, Reader(path) as reader:
        journal.append(started(1))
        assert journal.append_durable(UpdateBegin(step=1, version=0)) == 2
        assert [record.event for record in reader.events_after(0, 10)] == [started(1), UpdateBegin(step=1, version=0)]
        assert journal.buffered == 0


def test_an_event_that_must_be_on_disk_cannot_be_appended_otherwise(path: Path) -> None:
    with Journal(path) as journal, pytest.raises(AssertionError, match="append_durable"):
        journal.append(CheckpointSaved(step=1, version=1, folder="f", size_bytes=1))


def test_a_durable_commit_is_full_and_a_batch_is_not(path: Path) -> None:
    statements: list[str] = []
    with Journal(path) as journal:
        journal._connection.set_trace_callback(statements.append)
        journal.append(started(1))
        journal.flush()
        journal.append_durable(UpdateBegin(step=1, version=0))
        journal.append(started(2))
        journal.flush()
        journal._connection.set_trace_callback(None)
    kept = [s for s in statements if not s.startswith("INSERT")]
    batch = ["PRAGMA synchronous=NORMAL", "BEGIN IMMEDIATE", "COMMIT"]
    assert kept == [*batch, "PRAGMA synchronous=FULL", "BEGIN IMMEDIATE", "COMMIT", *batch]


TRACED = """
import os, sys
from pathlib import Path
from rollplex.journal.events import IterationStarted, UpdateBegin
from rollplex_coordinator.records.journal import Journal
mark = lambda text: os.write(2, f"<{text}>".encode())
journal = Journal(Path(sys.argv[1]))
mark("batch")
for step in range(3):
    journal.append(IterationStarted(step=step, version=0, rows=()))
    journal.flush()
mark("durable")
journal.append_durable(UpdateBegin(step=2, version=0))
mark("over")
journal.close()
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_kernel_is_asked_to_sync_the_log_before_a_durable_append_returns(path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,write", "-o", str(trace)]
    done = subprocess.run(
        [*command, sys.executable, "-c", TRACED, str(path)], check=False, capture_output=True, timeout=60
    )
    if b"ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    text = trace.read_text()
    batch, durable = text.index("<batch>"), text.index("<durable>")
    assert "sync(" not in text[batch:durable].replace("<batch>", "")
    synced = [line for line in text[durable : text.index("<over>")].splitlines() if "sync(" in line]
    assert len(synced) == 1
    assert f"{path}-wal>" in synced[0]


# Forks one child per statement of the scenario; the child kills itself before that statement runs. It tells of each
# durable event after append_durable has returned.
KILLED = """
import os, signal, sqlite3, sys
from pathlib import Path
from rollplex_coordinator.records import journal_file
from rollplex.journal.events import CheckpointSaved, IterationStarted, UpdateBegin, UpdateCommitted
from rollplex_coordinator.records.journal import Journal

def scenario(folder, kill_at):
    seen = 0
    def statement(text):
        nonlocal seen
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    connect = sqlite3.connect
    def traced(*args, **kwargs):
        connection = connect(*args, **kwargs)
        connection.set_trace_callback(statement)
        return connection
    sqlite3.connect = traced
    told = os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    journal = Journal(folder / "journal.sqlite")
    for step in (1, 2):
        journal.append(IterationStarted(step=step, version=step - 1, rows=(step,)))
        journal.flush()
        for event in (
            UpdateBegin(step=step, version=step - 1),
            UpdateCommitted(step=step, version=step, digest="d", start_s=0.0, end_s=1.0),
            CheckpointSaved(step=step, version=step, folder="f", size_bytes=1),
        ):
            journal.append(IterationStarted(step=99, version=0, rows=()))
            os.write(told, f"{journal.append_durable(event)}\\n".encode())
    journal.close()
    os.write(told, b"0\\n")

kill_at, ended = 0, False
while not ended:
    kill_at += 1
    folder = Path(sys.argv[1]) / str(kill_at)
    folder.mkdir()
    child = os.fork()
    if child == 0:
        scenario(folder, kill_at)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    ended = status == 0
"""


def test_sigkill_before_any_statement_loses_no_durable_event_and_leaves_whole_transactions(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    folders = sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name))
    assert len(folders) > 30
    told: list[int] = []
    rows: list[Row] = []
    for folder in folders:
        told = [int(line) for line in (folder / "told").read_text().split()]
        with Journal(folder / "journal.sqlite") as journal:
            assert journal.moved_aside is None
            with Reader(journal.path) as reader:
                rows = reader.rows_after(0, 1_000)
        ids = [row.id for row in rows]
        assert ids == list(range(1, len(ids) + 1))
        assert set(told) <= {0, *ids}
        # Whole transactions: a flush of one event, then pairs that a durable event ends.
        assert len(ids) % 7 in (0, 1, 3, 5), folder
    assert told[-1] == 0, "the last child was to end by itself"
    assert len(rows) == 14


def test_the_next_writer_goes_on_with_the_next_id(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(started(1))
    with Journal(path) as journal:
        assert journal.append(started(2)) == 2
    assert steps_on_disk(path) == [1, 2]


def test_a_second_writer_is_refused_by_the_name_of_the_first(path: Path) -> None:
    with (
        Journal(path),
        pytest.raises(JournalError, match=f"another process writes this journal; got pid {os.getpid()}"),
    ):
        Journal(path)
    Journal(path).close()


def test_the_lock_of_a_killed_writer_is_free(path: Path) -> None:
    code = "import sys, time\nfrom pathlib import Path\nfrom rollplex_coordinator.records.journal import Journal\n"
    code += "journal = Journal(Path(sys.argv[1]))\nprint('open', flush=True)\ntime.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(JournalError, match=f"pid {child.pid}"):
            Journal(path)
        child.send_signal(signal.SIGKILL)
    Journal(path).close()


def test_a_reader_in_the_middle_of_a_transaction_does_not_hold_the_writer_up(path: Path) -> None:
    with Journal(path) as journal:
        journal.append_durable(UpdateBegin(step=1, version=0))
        slow = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
        slow.execute("BEGIN")
        assert slow.execute("SELECT count(*) FROM events").fetchone() == (1,)
        journal.append_durable(UpdateCommitted(step=1, version=1, digest="d", start_s=0.0, end_s=1.0))
        assert slow.execute("SELECT count(*) FROM events").fetchone() == (1,)
        slow.close()
    assert steps_on_disk(path) == [1, 1]


def test_a_locked_file_is_an_error_and_what_was_buffered_before_is_written_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex_coordinator.records.journal_file.BUSY_S", 0.05)
    with Journal(path) as journal:
        journal.append(started(1))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match="cannot write 2 events; got database is locked"):
            journal.append_durable(UpdateBegin(step=1, version=0))
        other.close()
        assert journal.buffered == 1, "an event that was refused is never written: what it announces did not happen"
        journal.flush()
        assert journal.buffered == 0
    assert steps_on_disk(path) == [1]


def test_a_full_disk_is_an_error_and_the_events_are_written_once_there_is_room(path: Path) -> None:
    with Journal(path) as journal:
        (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
        journal._connection.execute(f"PRAGMA max_page_count={pages}")
        journal.append(IterationStarted(step=1, version=0, rows=tuple(range(5_000))))
        with pytest.raises(JournalError, match=r"full; .*Free space"):
            journal.append_durable(UpdateBegin(step=1, version=0))
        journal._connection.execute("PRAGMA max_page_count=1000000")
        assert journal.append_durable(UpdateCommitted(step=1, version=1, digest="", start_s=0.0, end_s=0.0)) == 2
    assert steps_on_disk(path) == [1, 1]


def test_a_batch_interrupted_after_its_commit_is_not_written_twice(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(started(1))
        pending = list(journal._buffer)
        journal.flush()
        journal._buffer[:] = pending
        journal.append(started(2))
    assert steps_on_disk(path) == [1, 2]


def test_the_buffer_is_bounded(path: Path) -> None:
    with Journal(path) as journal:
        for step in range(MAX_BUFFERED):
            journal.append(started(step))
        assert journal.buffered == 0


def spoil_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"not a database at all")


def spoil_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 4096 // 2 * 4096)


@pytest.mark.parametrize("spoil", [spoil_header, spoil_pages, cut_short])
def test_a_damaged_file_is_renamed_aside_and_the_new_journal_says_so(path: Path, spoil: object) -> None:
    with Journal(path) as journal:
        for step in range(2_000):
            journal.append(started(step))
    assert callable(spoil)
    spoil(path)
    damaged = path.read_bytes()
    with Journal(path) as journal:
        aside = Path(f"{path}.corrupt-1")
        assert journal.moved_aside == aside
        assert aside.read_bytes() == damaged
        with Reader(path) as reader:
            (record,) = reader.events_after(0, 10)
        assert isinstance(record.event, JournalReplaced)
        assert record.event.moved_to == str(aside)
        assert record.event.why
    spoil_header(path)
    with Journal(path) as journal:
        assert journal.moved_aside == Path(f"{path}.corrupt-2")


def test_a_file_of_another_program_or_version_is_left_alone(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    with pytest.raises(JournalError, match="no journal of this version"):
        Journal(path)
    path.unlink()
    Journal(path).close()
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version=2")
    newer.close()
    with pytest.raises(JournalError, match="version 2"):
        Journal(path)
    assert not list(path.parent.glob("*.corrupt-*"))


def test_a_folder_that_is_missing_is_an_error_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"nowhere/journal\.sqlite"):
        Journal(tmp_path / "nowhere" / "journal.sqlite")
    with pytest.raises(JournalError, match="cannot read the journal"):
        Reader(tmp_path / "nowhere" / "journal.sqlite")


def test_the_journal_is_for_its_owner_only(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(started(1))
        journal.flush()
        files = sorted(path.parent.iterdir())
        assert [file.name[len(path.name) :] for file in files] == ["", "-shm", "-wal", ".lock"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_reads_are_bounded_in_rows_and_bytes_and_never_empty_while_there_are_rows(path: Path) -> None:
    with Journal(path) as journal:
        for step in range(5):
            journal.append(IterationStarted(step=step, version=0, rows=tuple(range(100))))
    with Reader(path) as reader:
        assert [row.id for row in reader.rows_after(1, 2)] == [2, 3]
        assert [row.id for row in reader.rows_after(0, 100, max_bytes=1)] == [1]
        assert reader.rows_after(5, 100) == []


def test_the_events_of_a_step_and_the_started_steps_are_found(path: Path) -> None:
    with Journal(path) as journal:
        for step in (1, 2, 3):
            journal.append(started(step))
            journal.append_durable(UpdateBegin(step=step, version=step))
    with Reader(path) as reader:
        assert [record.event for record in reader.events_of_step(2)] == [started(2), UpdateBegin(step=2, version=2)]
        assert reader.events_of_step(9) == []
        assert reader.steps(2, 10) == [2, 3]
        assert reader.steps(0, 1) == [1]
        plan = reader._connection.execute(
            "EXPLAIN QUERY PLAN SELECT DISTINCT step FROM events WHERE type = 'IterationStarted' AND step >= 2"
        ).fetchall()
        assert "events_started" in plan[0][3]


def test_a_second_close_closes_nothing_of_anybody_else(path: Path, tmp_path: Path) -> None:
    journal = Journal(path)
    journal.close()
    with (tmp_path / "other").open("wb") as other:  # takes the lock's old number
        journal.close()
        other.write(b"still open")
        other.flush()
    assert (tmp_path / "other").read_bytes() == b"still open"
