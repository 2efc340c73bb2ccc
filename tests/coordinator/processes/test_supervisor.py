"""Child processes: how they are started, how their end is seen, how they are ended."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollplex.errors import ConfigError, RollplexError
from rollplex.protocol.common import Device, Role
from rollplex.session import session_of
from rollplex.worker.starter import VARIABLE
from rollplex_coordinator.decisions.fleet import SINGLE, Fleet, fleet_of
from rollplex_coordinator.processes.environment import GpuAccess
from rollplex_coordinator.processes.supervisor import MODULES, Child, NotEndedError, Supervisor
from support.core import make_config

DEADLINE_S = 20.0
TELL = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "session": os.getsid(0), "pid": os.getpid(), "stdin": sys.stdin.read(),
                  "threads": os.environ["OMP_NUM_THREADS"], "offline": os.environ["HF_HUB_OFFLINE"],
                  "fds": sorted(os.listdir("/proc/self/fd"))}))
print("to stderr", file=sys.stderr)
"""
SLEEP = "import time; time.sleep(600)"
STARTS = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"

Make = Callable[..., Supervisor]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """make({Role.ROLLOUT: python code}): a supervisor whose children run this code."""
    made: list[Supervisor] = []

    def supervisor(programs: dict[Role, str], threads: int = 3, fleet: Fleet = SINGLE) -> Supervisor:
        commands = {role: (sys.executable, "-c", code) for role, code in programs.items()}
        made.append(Supervisor(tmp_path, threads, commands, fleet))
        return made[-1]

    yield supervisor
    for each in made:
        each.stop()


def ended(child: Child) -> bool:
    """Wait for the end as the coordinator's loop does: by the descriptor."""
    return bool(select.select([child.pidfd], [], [], DEADLINE_S)[0])


def test_a_child_gets_its_place_on_the_command_line_and_a_session_log_and_thread_pool_of_its_own(make: Make) -> None:
    supervisor = make({Role.ROLLOUT: TELL})
    child = supervisor.start(Role.ROLLOUT, Device(node=0, index=2))
    assert ended(child)
    first, second = child.log_path.read_text().splitlines()
    told = json.loads(first)
    run_dir = child.log_path.parent.parent
    assert told["argv"] == ["--run-dir", str(run_dir), "--device", "0:2", "--incarnation", "1"]
    assert told["session"] == told["pid"] == child.pid
    assert (told["stdin"], told["threads"], told["offline"]) == ("", "3", "1")
    assert len(told["fds"]) <= 4, "nothing of the coordinator's is inherited"
    assert second == "to stderr"
    assert child.log_path == run_dir / "logs" / "rollout.log"
    assert supervisor.log_text(Role.ROLLOUT) == str(child.log_path)


def test_incarnations_count_up_and_logs_go_on(make: Make) -> None:
    supervisor = make({Role.REWARD: "import sys; print(sys.argv[-1])"})
    for incarnation in (1, 2, 3):
        child = supervisor.start(Role.REWARD, Device())
        assert child.incarnation == incarnation
        assert ended(child)
        supervisor.kill(Role.REWARD)
        assert supervisor.child(Role.REWARD) is None
    assert child.log_path.read_text().split() == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("pass", "exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
    ],
)
def test_how_a_child_ended_is_said_in_words(make: Make, code: str, how: str) -> None:
    supervisor = make({Role.TRAINER: code})
    child = supervisor.start(Role.TRAINER, Device())
    assert ended(child)
    assert supervisor.exit_text(Role.TRAINER) == how
    assert supervisor.child(Role.TRAINER) is child
    assert not supervisor.running


def test_of_a_child_that_runs_and_of_somebody_else_s_nothing_is_said(make: Make) -> None:
    supervisor = make({Role.PREFIX: SLEEP})
    child = supervisor.start(Role.PREFIX, Device())
    assert supervisor.running
    assert (supervisor.exit_text(Role.PREFIX), supervisor.exit_text(Role.ROLLOUT)) == ("", "")
    assert supervisor.log_text(Role.ROLLOUT) == ""
    assert not select.select([child.pidfd], [], [], 0)[0]
    os.kill(child.pid, signal.SIGTERM)
    assert ended(child)
    assert supervisor.exit_text(Role.PREFIX) == "killed by SIGTERM"


def test_ending_all_names_those_that_had_to_be_killed_and_leaves_no_process_and_no_descriptor(make: Make) -> None:
    supervisor = make({Role.PREFIX: SLEEP, Role.ROLLOUT: "pass"})
    late, early = supervisor.start(Role.PREFIX, Device()), supervisor.start(Role.ROLLOUT, Device())
    assert ended(early)
    assert supervisor.stop() == [Role.PREFIX]
    assert late.process.returncode == -signal.SIGKILL
    for child in (late, early):
        assert not Path(f"/proc/{child.pid}").exists()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(child.pidfd)
    assert supervisor.stop() == []


def test_on_several_devices_each_process_of_a_role_has_a_name_a_log_and_an_end_of_its_own(
    make: Make, model_folder: Path
) -> None:
    fleet = fleet_of(make_config(model_folder, parallel={"devices": 2}))
    first, second = fleet.devices
    supervisor = make({Role.ROLLOUT: SLEEP, Role.REWARD: "pass"}, fleet=fleet)
    children = [supervisor.start(Role.ROLLOUT, device) for device in fleet.devices]
    assert ended(supervisor.start(Role.REWARD, first))
    assert [child.log_path.name for child in children] == ["rollout-0.log", "rollout-1.log"]
    assert supervisor.log_path(Role.REWARD).name == "reward.log"
    assert [supervisor.child(Role.ROLLOUT, device) for device in fleet.devices] == children
    assert [supervisor.name_of(child.pid) for child in children] == ["rollout[0:0]", "rollout[0:1]"]
    os.kill(children[1].pid, signal.SIGKILL)
    assert ended(children[1])
    assert [supervisor.exit_text(Role.ROLLOUT, device) for device in fleet.devices] == ["", "killed by SIGKILL"]
    supervisor.kill(Role.ROLLOUT, second)
    assert supervisor.start(Role.ROLLOUT, second).incarnation == 2
    assert sorted(supervisor.stop()) == ["rollout[0:0]", "rollout[0:1]"]


def test_killing_who_was_never_started_does_nothing(make: Make) -> None:
    make({}).kill(Role.TRAINER)


def test_each_role_is_a_module_that_can_be_run() -> None:
    for module in MODULES.values():
        __import__(module)
        name = sys.modules[module].__file__
        assert name is not None
        assert (Path(name).parent / "__main__.py").is_file(), module


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def test_where_workers_share_a_gpu_they_are_asked_first_then_freed_from_it_then_killed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.TERM_S", 0.3)
    supervisor = make({Role.PREFIX: STUBBORN, Role.ROLLOUT: SLEEP, Role.TRAINER: STUBBORN, Role.REWARD: SLEEP})
    freed: list[int] = []

    def free(device: Device, pid: int) -> None:
        assert device == Device()
        freed.append(pid)
        if pid == trainer.pid:
            os.kill(pid, signal.SIGABRT)

    supervisor.free_gpu = free
    prefix, rollout, trainer, reward = (
        supervisor.start(role, Device()) for role in (Role.PREFIX, Role.ROLLOUT, Role.TRAINER, Role.REWARD)
    )
    for child in (prefix, trainer):
        while "up" not in child.log_path.read_text():
            assert child.process.poll() is None
    assert set(supervisor.stop()) == {Role.PREFIX, Role.ROLLOUT, Role.TRAINER, Role.REWARD}
    assert freed == [prefix.pid, trainer.pid], "who ends by SIGTERM, or has no GPU, needs no more"
    codes = [child.process.returncode for child in (prefix, rollout, trainer, reward)]
    assert codes == [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT, -signal.SIGKILL]


def test_a_child_that_the_kernel_holds_is_named_and_the_others_are_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = make({Role.PREFIX: SLEEP, Role.TRAINER: SLEEP})
    held, other = (supervisor.start(role, Device()) for role in (Role.PREFIX, Role.TRAINER))

    def wait(timeout: float) -> int:
        raise subprocess.TimeoutExpired("prefix", timeout)

    with monkeypatch.context() as held_by_the_kernel:
        held_by_the_kernel.setattr(held.process, "wait", wait)
        assert set(supervisor.stop()) == {Role.PREFIX, Role.TRAINER}
    assert f"prefix (pid {held.pid}) was killed, but has not ended" in caplog.text
    assert other.process.returncode == -signal.SIGKILL
    held.process.wait(DEADLINE_S)


def test_a_child_is_told_who_started_it(make: Make) -> None:
    child = make({Role.PREFIX: f"import os; print(os.environ[{VARIABLE!r}])"}).start(Role.PREFIX, Device())
    assert ended(child)
    assert child.log_path.read_text() == f"{os.getpid()}\n"


def test_no_file_left_is_not_the_fault_of_a_program(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = make({Role.PREFIX: SLEEP})

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", none_left)
    with pytest.raises(
        RollplexError, match="process of prefix cannot be started; .*Too many open files.*ulimit -n"
    ) as e:
        supervisor.start(Role.PREFIX, Device())
    assert not isinstance(e.value, ConfigError)


def test_a_child_s_environment_says_which_gpu_it_sees(make: Make) -> None:
    tell = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"
    supervisor = make({Role.PREFIX: tell, Role.REWARD: tell})
    supervisor.gpus = {Device(): GpuAccess(uuid="GPU-1", mps={}, deterministic=True)}
    for role, seen in ((Role.PREFIX, "GPU-1"), (Role.REWARD, "")):
        child = supervisor.start(role, Device())
        assert ended(child)
        assert child.log_path.read_text().strip() == seen


def test_each_device_s_worker_sees_its_own_gpu_and_is_freed_from_that_one(
    make: Make, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.TERM_S", 0.1)
    fleet = fleet_of(make_config(model_folder, parallel={"devices": 2}))
    tell = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['NCCL_NVLS_ENABLE'], flush=True); "
    supervisor = make({Role.ROLLOUT: tell + STUBBORN}, fleet=fleet)
    supervisor.gpus = {
        device: GpuAccess(uuid=f"GPU-{device.index}", mps={}, deterministic=True, several=True)
        for device in fleet.devices
    }
    freed: list[tuple[Device, int]] = []
    supervisor.free_gpu = lambda device, pid: freed.append((device, pid))
    children = [supervisor.start(Role.ROLLOUT, device) for device in fleet.devices]
    for child in children:
        while "up" not in child.log_path.read_text():
            assert child.process.poll() is None
    assert [child.log_path.read_text().splitlines()[0] for child in children] == ["GPU-0 0", "GPU-1 0"]
    supervisor.stop()
    assert freed == [(child.device, child.pid) for child in children]


def test_what_a_worker_started_is_freed_from_the_gpu_and_ends_with_it_even_if_it_ended_before(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.TERM_S", 0.1)
    starts = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); "
    stays = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + starts + "time.sleep(600)"
    supervisor = make({Role.ROLLOUT: stays, Role.PREFIX: starts})
    freed: list[int] = []
    supervisor.free_gpu = lambda _, pid: freed.append(pid)
    children = [supervisor.start(role, Device()) for role in (Role.ROLLOUT, Role.PREFIX)]
    started = []
    for child in children:
        while not child.log_path.read_text().strip():
            time.sleep(0.01)
        started.append(int(child.log_path.read_text()))
    assert ended(children[1])
    assert [session_of(child.pid) for child in children] == [[started[0]], [started[1]]]
    assert supervisor.stop() == [Role.ROLLOUT]
    assert freed == [children[0].pid, started[0]]
    assert [session_of(child.pid) for child in children] == [[], []]


def test_a_process_is_known_by_the_child_that_started_it(make: Make) -> None:
    started = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    supervisor = make({Role.ROLLOUT: started})
    child = supervisor.start(Role.ROLLOUT, Device())
    while not child.log_path.read_text().strip():
        assert child.process.poll() is None
    grandchild = int(child.log_path.read_text())
    try:
        assert supervisor.name_of(child.pid) == supervisor.name_of(grandchild) == "rollout"
        assert supervisor.name_of(os.getpid()) == ""
        assert supervisor.name_of(2**22 + 1) == ""
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_program_that_is_not_there_is_named_with_where_to_name_another(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 1, {Role.PREFIX: ("/no/such/program",)})
    with pytest.raises(
        ConfigError, match=r"the program of prefix cannot be started; got .*No such file.*services\.prefix"
    ):
        supervisor.start(Role.PREFIX, Device())
    assert supervisor.children == ()


def test_of_some_roles_all_are_ended_and_the_others_stay(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.TERM_S", 0.3)
    supervisor = make({Role.PREFIX: STUBBORN, Role.ROLLOUT: SLEEP, Role.TRAINER: "", Role.REWARD: SLEEP})
    prefix, rollout, trainer, reward = (
        supervisor.start(role, Device()) for role in (Role.PREFIX, Role.ROLLOUT, Role.TRAINER, Role.REWARD)
    )
    assert ended(trainer)
    os.kill(rollout.pid, signal.SIGSTOP)
    while Path(f"/proc/{rollout.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert rollout.process.poll() is None
    while "up" not in prefix.log_path.read_text():
        assert prefix.process.poll() is None
    freed: list[int] = []
    supervisor.free_gpu = lambda _device, pid: freed.append(pid)
    supervisor.end({Role.ROLLOUT, Role.PREFIX, Role.TRAINER})
    assert freed == [prefix.pid, rollout.pid]
    assert [child.process.returncode for child in (prefix, rollout, trainer)] == [-9, -9, 0]
    assert supervisor.children == (reward,)
    assert supervisor.start(Role.ROLLOUT, Device()).incarnation == 2


def started_by(child: Child) -> int:
    """The process that a child of `STARTS` has started."""
    while not child.log_path.read_text().strip():
        assert child.process.poll() is None
    return int(child.log_path.read_text())


@pytest.mark.parametrize("way", ["kill", "end"])
def test_a_worker_that_does_not_end_by_a_kill_is_told_and_the_others_end(
    make: Make, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.KILLED_S", 0.2)
    supervisor = make({Role.ROLLOUT: SLEEP, Role.TRAINER: SLEEP})
    held, other = (supervisor.start(role, Device()) for role in (Role.ROLLOUT, Role.TRAINER))
    with monkeypatch.context() as kernel:
        kernel.setattr(held.process, "kill", lambda: None)
        staying = (
            supervisor.kill(Role.ROLLOUT)
            if way == "kill"
            else supervisor.end({Role.ROLLOUT, Role.TRAINER, Role.PREFIX})
        )
    try:
        assert staying == [f"rollout (pid {held.pid})"]
        assert held.process.poll() is None
        assert other.process.poll() == (None if way == "kill" else -signal.SIGKILL)
        assert supervisor.child(Role.ROLLOUT) is None
    finally:
        held.process.kill()
        held.process.wait(DEADLINE_S)


def test_what_a_worker_started_and_a_kill_does_not_end_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.KILLED_S", 0.2)
    supervisor = make({Role.ROLLOUT: STARTS})
    child = supervisor.start(Role.ROLLOUT, Device())
    scheduler = started_by(child)
    with monkeypatch.context() as kernel:
        kernel.setattr("rollplex.session.kill", lambda pid: None)
        staying = supervisor.end({Role.ROLLOUT})
    try:
        assert staying == [f"a process of rollout (pid {scheduler})"]
        assert child.process.returncode == -signal.SIGKILL
    finally:
        os.kill(scheduler, signal.SIGKILL)


def test_one_deadline_is_that_of_all_and_each_is_killed_before_any_is_awaited(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.supervisor.KILLED_S", 1.0)
    supervisor = make({Role.ROLLOUT: SLEEP, Role.PREFIX: SLEEP, Role.TRAINER: STARTS})
    held = [supervisor.start(role, Device()) for role in (Role.ROLLOUT, Role.PREFIX)]
    last = supervisor.start(Role.TRAINER, Device())
    started_by(last)
    with monkeypatch.context() as kernel:
        for child in held:
            kernel.setattr(child.process, "kill", lambda: None)
        staying = supervisor.end({Role.ROLLOUT, Role.PREFIX, Role.TRAINER})
    try:
        assert staying == [f"rollout (pid {held[0].pid})", f"prefix (pid {held[1].pid})"]
        assert last.process.returncode == -signal.SIGKILL
    finally:
        for child in held:
            child.process.kill()
            child.process.wait(DEADLINE_S)


def test_a_process_whose_first_thread_has_ended_is_alive_as_long_as_another_runs(make: Make) -> None:
    threads = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
        "print('up', flush=True); ctypes.CDLL(None).pthread_exit(None)"
    )
    starts = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {threads!r}]); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    supervisor = make({Role.ROLLOUT: starts})
    child = supervisor.start(Role.ROLLOUT, Device())
    while len(lines := child.log_path.read_text().split()) < 2:
        assert child.process.poll() is None
    (pid,) = (int(line) for line in lines if line != "up")
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert child.process.poll() is None
    assert session_of(child.pid) == [pid]
    assert supervisor.end({Role.ROLLOUT}) == []
    assert session_of(child.pid) == []


def test_a_dead_process_that_nobody_has_collected_is_not_alive(make: Make) -> None:
    starts = "import subprocess, time; p = subprocess.Popen(['true']); print(p.pid, flush=True); time.sleep(600)"
    supervisor = make({Role.ROLLOUT: starts})
    child = supervisor.start(Role.ROLLOUT, Device())
    pid = started_by(child)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert child.process.poll() is None
    assert session_of(child.pid) == []


def test_those_that_stay_are_named_with_what_to_do() -> None:
    text = str(NotEndedError.of(["rollout (pid 7)", "a process of prefix (pid 9)"]))
    assert "have not ended: the kernel holds them; got rollout (pid 7), a process of prefix (pid 9)" in text
    assert "rollplex up --resume" in text
