"""The folder of an engine's sockets, and a start that comes to nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio

from rollplex.errors import EngineError
from rollplex_rollout.sglang import leftovers, runtime
from rollplex_rollout.sglang.runtime import SglangRuntime, make_folder


def test_a_folder_is_closed_to_others_and_those_of_dead_processes_go(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    stale, alive = tmp_path / f"sglang-{gone.pid}-abc", tmp_path / f"sglang-{os.getppid()}-abc"
    other = tmp_path / "sockets"
    for path in (stale, alive, other):
        path.mkdir()
    made = make_folder(tmp_path)
    assert made.stat().st_mode & 0o777 == 0o700
    assert sorted(tmp_path.iterdir()) == sorted([alive, made, other])


def test_the_file_that_sglang_of_a_dead_process_left_elsewhere_goes_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, run_dir = tmp_path / "shm", tmp_path / "run"
    monkeypatch.setattr(leftovers, "SHARED", shared)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    files = [shared / name for name in ("sglang_loads_a.shm", "sglang_loads_b.shm", "others")]
    folders = [run_dir / name for name in (f"sglang-{gone.pid}-a", f"sglang-{os.getppid()}-b", f"sglang-{gone.pid}-c")]
    for path in (shared, run_dir, *folders):
        path.mkdir()
    for file, folder in zip(files, folders, strict=True):
        file.touch()
        leftovers.note(folder, file)
    (folders[2] / "shared_file").write_text("../shm/others")
    made = SglangRuntime(make_folder(run_dir))
    assert sorted(shared.iterdir()) == sorted(files[1:]), "neither of a live process nor what SGLang does not make"
    assert sorted(run_dir.iterdir()) == sorted([folders[1], made.folder])
    files[0].touch()
    leftovers.note(made.folder, files[0])
    made.close()
    assert not files[0].exists()
    assert not made.folder.exists()


def test_an_engine_that_cannot_be_made_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'sglang'")

    monkeypatch.setattr(runtime, "_make", fail)
    before = signal.getsignal(signal.SIGQUIT)
    made = SglangRuntime(make_folder(tmp_path))
    with pytest.raises(EngineError, match="No module named 'sglang'"):
        made.start({}, lambda _: None)
    made.close()
    assert signal.getsignal(signal.SIGQUIT) == before
    assert list(tmp_path.iterdir()) == []


def test_sockets_of_an_engine_that_was_half_made_are_closed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = zmq.asyncio.Context(), zmq.Context()
    made = SglangRuntime(make_folder(tmp_path))
    pushed, pulled, other = theirs.socket(zmq.PUSH), theirs.socket(zmq.PULL), ours.socket(zmq.PUSH)
    other.bind(f"ipc://{made.folder}/other")
    sent = ours.socket(zmq.PUSH)
    sent.connect(f"ipc://{made.folder}/nobody")
    sent.send(b"never read")

    def fail(_: object, connected: Callable[[object], None], __: object) -> None:
        pulled.bind(f"ipc://{made.folder}/tokenizer")
        connected(SimpleNamespace(recv_from_detokenizer=pulled, send_to_scheduler=pushed))
        raise RuntimeError("half made")

    monkeypatch.setattr(runtime, "_make", fail)
    with pytest.raises(EngineError, match="half made"):
        made.start({}, lambda _: None)
    made.close()
    assert (pushed.closed, pulled.closed, theirs.closed) == (True, True, True)
    assert (other.closed, sent.closed, ours.closed) == (False, False, False), "of others, even in the same folder"
    ours.destroy(linger=0)


def test_ranks_meet_by_a_file_in_the_engines_folder_and_by_no_tcp_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def look(*_: object) -> None:
        seen.append(os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"])
        raise RuntimeError("enough")

    monkeypatch.setattr(runtime, "_make", look)
    monkeypatch.setenv("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "tcp://0.0.0.0:5000")
    made = SglangRuntime(make_folder(tmp_path))
    with pytest.raises(EngineError, match="enough"):
        made.start({}, lambda _: None)
    made.close()
    assert seen == [f"file://{made.folder}/rendezvous"]
    known = tmp_path / "meet.rollout.1.sglang.0"
    made = SglangRuntime(make_folder(tmp_path), known)
    with pytest.raises(EngineError, match="enough"):
        made.start({}, lambda _: None)
    made.close()
    assert seen[1] == f"file://{known}", "that all ranks of an engine know"
    odd = tmp_path / "a?b"
    odd.mkdir()
    made = SglangRuntime(make_folder(odd))
    with pytest.raises(EngineError, match=r"needed a path without \?, # and ;"):
        made.start({}, lambda _: None)
    made.close()


def test_a_child_that_reports_a_failure_is_noted_instead_of_ending_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def report(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGQUIT)
        over.wait(30)
        raise RuntimeError("over")

    monkeypatch.setattr(runtime, "_make", report)
    made = SglangRuntime(make_folder(tmp_path))
    with pytest.raises(EngineError, match="SIGQUIT"):
        made.start({}, lambda _: None)
    over.set()
    made.close()


def test_the_cuda_runtime_of_python_packages_is_found_by_what_is_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    runtime._let_preload_find_libraries()
    runtime._let_preload_find_libraries()
    known, *found = os.environ["LD_LIBRARY_PATH"].split(":")
    assert known == "/somewhere"
    assert found.count(str(library.parent)) == 1, "beside those of a real one, where it is installed"
