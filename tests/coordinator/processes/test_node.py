"""A node's belongings: processes that really start, join, die and leave; signals; the orderly end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollplex.errors import ConfigError, ServiceDied
from rollplex.journal import events
from rollplex.journal.phases import Phase
from rollplex.journal.reader import Reader
from rollplex.memory.segment import Backend, backend
from rollplex.nvml import Gpu
from rollplex.protocol.claim import claim
from rollplex.protocol.common import Device, Kind, Memory, Role
from rollplex_coordinator.decisions.fleet import DEVICE
from rollplex_coordinator.decisions.ledger import Ledger
from rollplex_coordinator.memory.leasing import Memory as Leases
from rollplex_coordinator.options import Options
from rollplex_coordinator.processes import node as node_module
from rollplex_coordinator.processes.gpus import open_gpus
from rollplex_coordinator.processes.mps import Mps, MpsError
from rollplex_coordinator.processes.node import Node, commands
from rollplex_coordinator.processes.stop import Signals, StopRun
from rollplex_coordinator.processes.supervisor import NotEndedError
from support import fake_mps
from support.core import make_config
from support.fake_nvml import FakeNvml
from support.sockets import DEADLINE_S, Worker

JOIN_S = 60.0
"""A real worker imports torch, beside other tests."""
WORKER = """
from rollplex.protocol.common import Role
from rollplex.worker import run
run(Role.ROLLOUT, lambda segments: None)
"""
MakeNode = Callable[..., Node]


def run_of(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def make_node(model_folder: Path, tmp_path: Path) -> Iterator[MakeNode]:
    """make_node(rollout=python code, external=...): a node in a run directory of its own."""
    with ExitStack() as stack:

        def make(
            rollout: str = WORKER,
            *,
            leave_s: float = 10.0,
            device: dict[str, Any] | None = None,
            parallel: dict[str, Any] | None = None,
            **changes: Any,
        ) -> Node:
            run_dir = tmp_path / "run"
            claimed = stack.enter_context(claim(run_dir, "test-run"))
            config = make_config(
                model_folder,
                services={"rollout": run_of(rollout)},
                deadlines={"leave_s": leave_s, "start_s": 20.0},
                device=device or {},
                parallel=parallel or {},
            )
            given: dict[str, Any] = {
                "config": Path("c.yaml"),
                "run_dir": run_dir,
                "iterations": None,
                "serve": False,
                "external_workers": False,
                "die_with_parent": False,
            }
            read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
            signals = Signals(read_fd=read_fd, write_fd=write_fd, received=[])
            node = Node(claimed, "test-run", config, Options(**{**given, **changes}), signals)
            node.signals = signals  # type: ignore[attr-defined] # for the test
            stack.callback(os.close, read_fd)
            stack.callback(os.close, write_fd)
            stack.callback(lambda: _end(node))
            return node

        yield make


def _end(node: Node) -> None:
    """Whatever the test left."""
    if node.link.hub._router.closed:
        node.mailbox.close()
        return
    node.supervisor.stop()
    node.mailbox.close()
    node.link.hub.close()
    node.holder.close_all()
    if node.gpus is not None:
        node.gpus.close()
    node.record.close()


def journalled(node: Node, kind: type[Any]) -> list[Any]:
    with Reader(node.run_dir / "journal.sqlite") as reader:
        return [record.event for record in reader.events_after(0, 1000) if isinstance(record.event, kind)]


def join(node: Node, role: Role = Role.ROLLOUT) -> None:
    node.start(role)
    node.link.await_peers([role], JOIN_S)


def test_a_child_that_is_started_is_let_in_and_journalled_with_its_log(make_node: MakeNode) -> None:
    node = make_node()
    join(node)
    child = node.supervisor.child(Role.ROLLOUT)
    assert child is not None
    assert node.link.peers[Role.ROLLOUT].pid == child.pid
    node.record.journal.flush()
    (started,) = journalled(node, events.ServiceStarted)
    assert (started.service, started.role, started.incarnation) == ("rollout[0:0]", Role.ROLLOUT, 1)
    assert (started.pid, started.log_path) == (child.pid, str(child.log_path))


def test_how_long_the_processes_took_to_join_is_journalled_for_the_start_of_the_run_only(make_node: MakeNode) -> None:
    node = make_node()
    node.record.enter(Phase.LOAD)
    join(node)
    node.record.enter(Phase.IDLE)
    join(node, Role.PREFIX)
    node.record.journal.flush()
    one, both = journalled(node, events.StageDone)
    assert (one.name, both.name) == ("rollout process", "processes")
    assert both.start_s <= one.start_s <= one.end_s <= both.end_s


def test_a_child_that_ends_before_it_joins_is_a_death_with_its_exit_code_and_its_log(make_node: MakeNode) -> None:
    node = make_node("raise SystemExit(5)")
    node.record.enter(Phase.LOAD)
    node.start(Role.ROLLOUT)
    with pytest.raises(ServiceDied, match=r"rollout service died; got exit code 5.*join the run.*logs/rollout.log"):
        node.link.await_peers([Role.ROLLOUT], DEADLINE_S)
    node.record.journal.flush()
    (died,) = journalled(node, events.ServiceDied)
    assert (died.role, died.how, died.phase) == (Role.ROLLOUT, "exit code 5", "LOAD")
    assert died.log_path.endswith("logs/rollout.log")
    assert died.pid > 0


def test_a_child_that_is_killed_is_a_death_at_once(make_node: MakeNode) -> None:
    node = make_node()
    join(node)
    os.kill(node.link.peers[Role.ROLLOUT].pid, signal.SIGKILL)
    with pytest.raises(ServiceDied, match="got killed by SIGKILL"):
        node.link.pump(lambda: False)
    node.record.journal.flush()
    assert [event.how for event in journalled(node, events.ServiceDied)] == ["killed by SIGKILL"]


def test_workers_that_somebody_else_starts_are_only_awaited(make_node: MakeNode) -> None:
    node = make_node(external_workers=True)
    node.start(Role.ROLLOUT)
    assert node.supervisor.child(Role.ROLLOUT) is None
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(Worker, node.run_dir, Role.ROLLOUT, 4)
        node.link.await_peers([Role.ROLLOUT], DEADLINE_S)
        worker = coming.result(DEADLINE_S)
    assert node.link.peers[Role.ROLLOUT].incarnation == 4
    node.record.journal.flush()
    (started,) = journalled(node, events.ServiceStarted)
    assert (started.incarnation, started.pid, started.log_path) == (4, os.getpid(), "")
    worker.die()
    with pytest.raises(ServiceDied, match="its connection ended.*the log of its container"):
        node.link.pump(lambda: False)
    worker.close()


def test_the_end_tells_everybody_to_leave_and_closes_everything(make_node: MakeNode) -> None:
    node = make_node()
    join(node)
    child = node.supervisor.child(Role.ROLLOUT)
    assert child is not None
    segment = node.holder.create(Kind.INPUTS, 4096, lease=1)
    node.end("the run ended")
    assert child.process.returncode == 0
    assert "told to leave: the run ended" in child.log_path.read_text()
    assert node.holder.find(segment.segment) is None
    assert not Path(f"/proc/{child.pid}").exists()


def test_a_child_that_does_not_leave_in_time_is_killed_and_named(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node("import time; time.sleep(600)", leave_s=0.2)
    node.start(Role.ROLLOUT)
    starting = node.supervisor.child(Role.ROLLOUT)
    assert starting is not None
    node.end("the run ended")
    assert starting.process.returncode == -signal.SIGKILL
    assert "did not leave" not in caplog.text, "it was still starting: nobody could tell it"


def test_a_worker_that_hangs_at_the_end_is_killed_and_named(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(leave_s=0.3)
    join(node)
    peer = node.link.peers[Role.ROLLOUT]
    os.kill(peer.pid, signal.SIGSTOP)
    node.end("the run ended")
    assert "rollout did not leave in time and was killed" in caplog.text
    assert not Path(f"/proc/{peer.pid}").exists()


def test_of_a_role_on_several_devices_all_are_started_and_the_one_that_hangs_is_named(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(leave_s=0.5, parallel={"devices": 2})
    (node.run_dir / "meet.rollout.1").touch()
    join(node)
    first, second = node.fleet.devices
    peers = [node.link.peer(Role.ROLLOUT, device) for device in (first, second)]
    assert [str(peer) for peer in peers] == ["rollout[0:0]", "rollout[0:1]"]
    node.record.journal.flush()
    started = journalled(node, events.ServiceStarted)
    assert [(event.service, Path(event.log_path).name) for event in started] == [
        ("rollout[0:0]", "rollout-0.log"),
        ("rollout[0:1]", "rollout-1.log"),
    ]
    assert peers[1] is not None
    os.kill(peers[1].pid, signal.SIGSTOP)
    node.end("the run ended")
    assert "rollout[0:1] did not leave in time and was killed" in caplog.text
    assert "rollout[0:0] did not" not in caplog.text
    assert not list(node.run_dir.glob("meet.*"))


def test_a_signal_stops_the_run(make_node: MakeNode) -> None:
    node = make_node()
    signals: Signals = node.signals  # type: ignore[attr-defined] # set above
    signals.received.append(signal.SIGINT)
    os.write(signals.write_fd, b"s")
    with pytest.raises(StopRun, match="SIGINT") as caught:
        node.link.pump(lambda: False)
    assert caught.value.exit_code == 130


def test_calls_from_other_threads_are_served_by_the_loop(make_node: MakeNode) -> None:
    node = make_node()
    with ThreadPoolExecutor() as pool:
        result = pool.submit(node.mailbox.call, lambda: "answer", "a question", DEADLINE_S)
        node.link.pump(result.done)
    assert result.result() == "answer"


def test_the_end_of_the_process_that_started_it_ends_the_run(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = subprocess.Popen(run_of("import time; time.sleep(600)"))
    monkeypatch.setattr(os, "getppid", lambda: parent.pid)
    node = make_node(die_with_parent=True)
    turns: list[float] = []
    node.link.after_turn = lambda: turns.append(time.monotonic())
    node.link.pump(lambda: bool(turns))
    parent.kill()
    with pytest.raises(StopRun, match="the end of the process that started it") as caught:
        node.link.pump(lambda: False)
    assert caught.value.exit_code == 1
    parent.wait(10)


def test_only_the_services_that_the_configuration_names_are_replaced(model_folder: Path) -> None:
    assert commands(make_config(model_folder)) == {}
    named = make_config(model_folder, services={"prefix": ["their-prefix", "--fast"]})
    assert commands(named) == {Role.PREFIX: ("their-prefix", "--fast")}
    assert str(DEVICE) == "0:0"


# --- on a GPU -----------------------------------------------------------------------------------------------------

TELL_GPU = """
import os, sys
print(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_MPS_PIPE_DIRECTORY"), flush=True)
sys.exit(4)
"""


@pytest.fixture
def on_gpu(make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeNode:
    """As `make_node`, on a machine with two GPUs and the MPS daemon in name only."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.setenv(name, "")  # so that what a node sets is undone
    for name, value in fake_mps.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    fake = FakeNvml(total=2**30, used=2**20, count=2)
    monkeypatch.setattr(
        node_module, "open_gpus", lambda config, folder, devices: open_gpus(config, folder, devices, of(fake))
    )

    def make_backend(name: str, *, uuid: str = "") -> Backend:
        if name == "cuda":
            seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
            assert uuid in seen, "the driver reads it when it is opened"
            assert seen == ["GPU-1234", "GPU-1234-1"][: len(seen)]
        return backend("host")

    monkeypatch.setattr(node_module, "backend", make_backend)

    def make(rollout: str = WORKER, **changes: Any) -> Node:
        return make_node(rollout, device={"kind": "cuda"}, **changes)

    return make


def daemon_of(node: Node, device: Device = DEVICE) -> Mps:
    assert node.gpus is not None
    found = node.gpus.daemon(device)
    assert found is not None
    return found


def of(fake: FakeNvml) -> Callable[[int], Gpu]:
    return lambda index: Gpu(fake, index)


def test_a_node_says_which_gpu_it_has_and_how_it_is_shared_and_shows_it_to_its_workers(on_gpu: MakeNode) -> None:
    node = on_gpu(TELL_GPU)
    assert node.limit_bytes == 2**30 - 2**20
    node.prepare_device()
    daemon = daemon_of(node)
    pipe = str(daemon.folder)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1234"
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "", "the coordinator computes nothing: it is no client"
    node.start(Role.ROLLOUT)
    with pytest.raises(ServiceDied, match="exit code 4"):
        node.link.await_peers([Role.ROLLOUT], DEADLINE_S)
    assert node.supervisor.log_path(Role.ROLLOUT).read_text() == f"GPU-1234 {pipe}\n"
    node.record.journal.flush()
    (ready,) = journalled(node, events.DeviceReady)
    assert (ready.uuid, ready.name, ready.free_bytes) == ("GPU-1234", "NVIDIA H200", 2**30 - 2**20)
    assert (ready.sharing_asked, ready.sharing_used, ready.why) == ("mps", "mps", "")
    on_device = node.holder.create(Kind.GRADIENTS, 4096, lease=1, memory=Memory.CUDA)
    assert on_device.memory is Memory.CUDA
    node.end("the run ended")
    assert not daemon.alive
    assert not daemon.folder.exists()


def test_an_end_that_goes_wrong_half_way_leaves_neither_daemon_nor_segments(
    on_gpu: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = on_gpu()
    node.prepare_device()
    segment, daemon = node.holder.create(Kind.GRADIENTS, 4096, lease=1, memory=Memory.CUDA), daemon_of(node)
    join(node)
    child = node.supervisor.child(Role.ROLLOUT)
    assert child is not None

    def fail(*_: object) -> None:
        raise OSError("no more descriptors")

    with monkeypatch.context() as broken:
        broken.setattr(node.link, "await_ends", fail)
        with pytest.raises(OSError, match="no more descriptors"):
            node.end("the run ended")
    assert not daemon.alive
    assert not daemon.folder.exists()
    assert node.holder.find(segment.segment) is None
    assert child.process.returncode is not None


def test_turns_instead_of_a_daemon_are_journalled_with_the_reason(
    on_gpu: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "fail")
    node = on_gpu()
    node.prepare_device()
    node.record.journal.flush()
    (ready,) = journalled(node, events.DeviceReady)
    assert (ready.sharing_asked, ready.sharing_used) == ("mps", "turns")
    assert "exit code 1" in ready.why


def test_the_death_of_the_daemon_ends_the_run_and_is_named(on_gpu: MakeNode) -> None:
    node = on_gpu()
    node.prepare_device()
    os.kill(daemon_of(node).pid, signal.SIGKILL)
    with pytest.raises(MpsError, match="ended while the workers used the GPU.*device.sharing: turns"):
        node.link.pump(lambda: False)


def test_each_device_s_workers_see_the_gpu_of_their_device_through_its_daemon(on_gpu: MakeNode) -> None:
    node = on_gpu(TELL_GPU, parallel={"devices": 2})
    first, second = node.fleet.devices
    assert (node.limit_bytes, node.free_bytes) == (2 * (2**30 - 2**20), 2**30 - 2**20)
    node.prepare_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1234,GPU-1234-1"
    daemons = [daemon_of(node, device) for device in (first, second)]
    node.start(Role.ROLLOUT)
    for device, daemon, uuid in zip((first, second), daemons, ("GPU-1234", "GPU-1234-1"), strict=True):
        child = node.supervisor.child(Role.ROLLOUT, device)
        assert child is not None
        child.process.wait(DEADLINE_S)
        assert child.log_path.read_text() == f"{uuid} {daemon.folder}\n"
    node.record.journal.flush()
    ready = journalled(node, events.DeviceReady)
    assert [(event.device, event.gpu, event.uuid) for event in ready] == [
        (first, 0, "GPU-1234"),
        (second, 1, "GPU-1234-1"),
    ]
    node.end("the run ended")
    assert not [daemon for daemon in daemons if daemon.alive or daemon.folder.exists()]


def test_segments_of_a_device_are_made_on_its_gpu(on_gpu: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    class Named:
        """Host memory, that tells by which GPU's backend it was made."""

        def __init__(self, name: str) -> None:
            self._name, self._host = name, backend("host")

        def create(self, size_bytes: int, name: str) -> int:
            made.append((self._name, name))
            return self._host.create(size_bytes, name)

        def size(self, fd: int) -> int:
            return self._host.size(fd)

    node = on_gpu(parallel={"devices": 2})
    monkeypatch.setattr(node_module, "backend", lambda name, *, uuid="": Named(uuid))
    node.prepare_device()
    first, second = node.fleet.devices
    for lease, device in enumerate((first, second, second)):
        node.holder.create(Kind.GRADIENTS, 4096, lease=lease, memory=Memory.CUDA, device=device)
    assert [name for name, _ in made] == ["GPU-1234", "GPU-1234-1", "GPU-1234-1"]
    node.holder.create(Kind.INPUTS, 4096, lease=3, device=second)
    assert len(made) == 3, "host memory is nobody's GPU"
    assert node.holder.measured() == dict.fromkeys(range(4), 4096)


def test_the_death_of_any_daemon_ends_the_run(on_gpu: MakeNode) -> None:
    node = on_gpu(parallel={"devices": 2})
    node.prepare_device()
    dead = daemon_of(node, node.fleet.devices[1])
    os.kill(dead.pid, signal.SIGKILL)
    with pytest.raises(MpsError, match=f"pid {dead.pid} is gone.*logs/mps-1"):
        node.link.pump(lambda: False)


def test_more_gpus_than_the_machine_has_are_refused_before_anything_is_opened(on_gpu: MakeNode) -> None:
    with pytest.raises(ConfigError, match="There are not so many GPUs.*parallel.devices: 3") as caught:
        on_gpu(parallel={"devices": 3})
    assert caught.value.where == "parallel.devices"


def test_each_gpu_is_observed_against_its_share_of_the_budget(on_gpu: MakeNode) -> None:
    node = on_gpu(parallel={"devices": 2})
    node.prepare_device()
    first, second = node.fleet.devices
    memory = Leases(Ledger({first: 2**30, second: 2**30}), node.holder, node.record, first)
    memory.enter(Phase.LOAD)
    node.observe(memory, 2**29)
    assert node.observers is not None
    assert list(node.observers.on) == [first, second]
    node.observers.loaded()
    node.observers.close()
    memory.enter(Phase.IDLE)
    node.record.journal.flush()
    assert [event.device for event in journalled(node, events.MemoryObserved)] == [first, second]


def test_when_all_workers_end_their_daemon_does_too_and_the_new_one_is_watched(on_gpu: MakeNode) -> None:
    node = on_gpu(TELL_GPU)
    node.prepare_device()
    old = daemon_of(node)
    node.start(Role.ROLLOUT)
    node.end_workers()
    assert not old.alive
    new = daemon_of(node)
    node.start(Role.ROLLOUT)
    child = node.supervisor.child(Role.ROLLOUT, DEVICE)
    assert child is not None
    assert child.incarnation == 2
    child.process.wait(DEADLINE_S)
    assert child.log_path.read_text().splitlines()[-1] == f"GPU-1234 {new.folder}"
    node.end_workers()
    os.kill(daemon_of(node).pid, signal.SIGKILL)
    with pytest.raises(MpsError, match="ended while the workers used the GPU"):
        node.link.pump(lambda: False)


def test_what_ended_before_it_was_replaced_is_no_death(make_node: MakeNode) -> None:
    node = make_node("raise SystemExit(3)")
    node.start(Role.ROLLOUT)
    child = node.supervisor.child(Role.ROLLOUT, DEVICE)
    assert child is not None
    child.process.wait(DEADLINE_S)
    node.end_workers()
    end_s = time.monotonic() + 0.2
    node.link.pump(lambda: time.monotonic() > end_s)
    node.record.journal.flush()
    assert not journalled(node, events.ServiceDied)


def test_while_one_of_the_workers_is_still_there_nobody_takes_their_places(
    on_gpu: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.TERM_S", 0.1)
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.KILLED_S", 0.2)
    node = on_gpu(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    node.prepare_device()
    old = daemon_of(node)
    node.start(Role.ROLLOUT)
    child = node.supervisor.child(Role.ROLLOUT, DEVICE)
    assert child is not None
    while "up" not in child.log_path.read_text():
        assert child.process.poll() is None
    try:
        with monkeypatch.context() as kernel:
            kernel.setattr(child.process, "kill", lambda: None)
            with pytest.raises(NotEndedError, match=f"rollout.*pid {child.pid}"):
                node.end_workers()
    finally:
        child.process.kill()
        child.process.wait(DEADLINE_S)
    assert old.alive
    assert daemon_of(node) is old


def test_a_service_that_is_still_there_is_not_replaced(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.KILLED_S", 0.2)
    node = make_node("import time; time.sleep(600)", leave_s=0.1)
    node.start(Role.ROLLOUT)
    child = node.supervisor.child(Role.ROLLOUT, DEVICE)
    assert child is not None
    try:
        with monkeypatch.context() as kernel:
            kernel.setattr(child.process, "kill", lambda: None)
            with pytest.raises(NotEndedError, match=f"pid {child.pid}"):
                node.dismiss(Role.ROLLOUT, "another program takes this place")
    finally:
        child.process.kill()
        child.process.wait(DEADLINE_S)
