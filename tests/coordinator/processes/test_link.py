"""The line to the workers, over real sockets: answers, deadlines, deaths, stops."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollplex.errors import ProtocolError, ServiceDied, StateError, WaitError
from rollplex.protocol.common import (
    Device,
    DigestReply,
    DigestRequest,
    Drained,
    ErrorReport,
    Failed,
    Kind,
    Leave,
    Leaving,
    Logprobs,
    Responses,
    Role,
    SegmentRef,
)
from rollplex.protocol.inputs import WriteInputs
from rollplex.protocol.reward import GroupRewarded, RewardGroup
from rollplex.protocol.rollout import GroupFinished
from rollplex.worker.connection import connect_stream
from rollplex.worker.options import WorkerOptions
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.processes.link import PATIENCE_S, WorkerFailed
from rollplex_coordinator.processes.stop import StopRun
from support.sockets import ACK_S, DEADLINE_S, Site, Worker

SECTION_S = 1000.0
ROLLOUT = "rollout[0:0]"
SEGMENT = SegmentRef(segment=1, kind=Kind.INPUTS, size_bytes=8)


def digest(cause: int) -> DigestRequest:
    return DigestRequest(cause=cause)


def ask(site: Site, role: Role = Role.ROLLOUT, what: str = "digest the weights") -> int:
    return site.link.ask(role, digest, what, SECTION_S)


def answer(worker: Worker, text: str = "d") -> None:
    """Answer the next instruction."""
    worker.send(DigestReply(cause=worker.next().cause, version=1, digest=text))


def group_finished(cause: int) -> GroupFinished:
    return GroupFinished(
        cause=cause,
        step=0,
        version_start=0,
        version_end=0,
        responses=Responses(group=0, lengths=(1,), tokens=b"\0" * 4),
        logprobs=Logprobs(group=0, values=b"\0" * 8),
        stopped=(True,),
        end_s=1.0,
    )


def _reward(cause: int) -> RewardGroup:
    responses = Responses(group=1, lengths=(1,), tokens=b"\0" * 4)
    return RewardGroup(cause=cause, step=0, source="train", row=3, responses=responses, stopped=(True,))


def _rewarded(cause: int) -> GroupRewarded:
    half = b"\0" * 8
    return GroupRewarded(
        cause=cause, step=0, group=1, rewards=half, by_function=(half,), texts=("x",), start_s=0.0, end_s=0.0
    )


class Seen:
    """A handler that notes what it is given."""

    def __init__(self, site: Site, *kinds: type[Any]) -> None:
        self.messages: list[tuple[Role, Any]] = []
        for kind in kinds:
            site.link.on(kind, lambda peer, message: self.messages.append((peer.role, message)))

    def __len__(self) -> int:
        return len(self.messages)


# --- answers ------------------------------------------------------------------------------------------------------


def test_answers_go_to_the_handler_of_their_type_and_end_their_wait(site: Site) -> None:
    rollout, prefix = site.join(Role.ROLLOUT), site.join(Role.PREFIX)
    seen = Seen(site, DigestReply)
    first, second = ask(site), ask(site, Role.PREFIX)
    assert [(w.cause, w.peer) for w in site.link.waits.open] == [(first, ROLLOUT), (second, "prefix[0:0]")]
    answer(prefix, "p")
    site.link.pump(lambda: len(seen) == 1)
    assert [w.cause for w in site.link.waits.open] == [first]
    answer(rollout, "r")
    site.link.pump(lambda: len(seen) == 2)
    assert [(role, m.digest) for role, m in seen.messages] == [(Role.PREFIX, "p"), (Role.ROLLOUT, "r")]
    assert site.link.waits.open == []


def test_a_call_returns_its_answers_by_role_and_gives_the_handler_back(site: Site) -> None:
    workers = [site.join(Role.ROLLOUT), site.join(Role.PREFIX)]
    seen = Seen(site, DigestReply)
    for worker in workers:
        site.soon(lambda worker=worker: answer(worker, worker.messages._hello.role))
    answers = site.link.call_many({Role.ROLLOUT: digest, Role.PREFIX: digest}, "digest", SECTION_S, DigestReply)
    assert {role: message.digest for role, message in answers.items()} == {
        Role.ROLLOUT: "rollout",
        Role.PREFIX: "prefix",
    }
    assert not seen.messages
    ask(site)
    answer(workers[0])
    site.link.pump(lambda: len(seen) == 1)


def test_a_call_that_cannot_ask_everybody_gives_the_handler_back_too(site: Site) -> None:
    worker = site.join(Role.ROLLOUT)
    seen = Seen(site, DigestReply)
    with pytest.raises(ProtocolError, match="has not joined"):
        site.link.call_many({Role.ROLLOUT: digest, Role.PREFIX: digest}, "digest", SECTION_S, DigestReply)
    answer(worker)
    site.link.pump(lambda: not site.link.waits.open)
    assert len(seen) == 1


def test_an_answer_to_nothing_is_refused_and_names_what_is_awaited(site: Site) -> None:
    worker = site.join(Role.ROLLOUT)
    Seen(site, DigestReply)
    ask(site, what="the real thing")
    worker.send(DigestReply(cause=77, version=1, digest="d"))
    with pytest.raises(StateError, match=r"answer to 77 from rollout\[0:0\]; needed one of .*the real thing"):
        site.link.pump(lambda: False)


def test_an_answer_that_comes_twice_is_refused(site: Site) -> None:
    worker = site.join(Role.ROLLOUT)
    seen = Seen(site, DigestReply)
    cause = ask(site)
    for _ in range(2):
        worker.send(DigestReply(cause=cause, version=1, digest="d"))
    with pytest.raises(StateError, match="nobody waits for"):
        site.link.pump(lambda: False)
    assert len(seen) == 1


def test_an_answer_from_somebody_else_is_refused(site: Site) -> None:
    site.join(Role.ROLLOUT)
    prefix = site.join(Role.PREFIX)
    seen = Seen(site, DigestReply)
    prefix.send(DigestReply(cause=ask(site), version=1, digest="d"))
    with pytest.raises(StateError, match=r"from prefix\[0:0\]"):
        site.link.pump(lambda: False)
    assert len(seen) == 0


def test_an_answer_of_a_type_that_nobody_handles_is_refused(site: Site) -> None:
    worker = site.join(Role.ROLLOUT)
    worker.send(Drained(cause=ask(site), version=0))
    with pytest.raises(StateError, match="a message that nobody asked for; got Drained"):
        site.link.pump(lambda: False)


def test_a_worker_that_has_not_joined_cannot_be_instructed(site: Site) -> None:
    with pytest.raises(ProtocolError, match="prefix: cannot instruct a worker that has not joined; got digest"):
        ask(site, Role.PREFIX)
    assert site.link.waits.open == []


# --- deadlines ----------------------------------------------------------------------------------------------------


def test_a_worker_that_does_not_come_is_named_at_the_deadline(site: Site) -> None:
    site.join(Role.ROLLOUT)
    site.link.after_turn = lambda: site.clock.forward(500.0)
    with pytest.raises(WaitError, match=r"trainer\[0:0\] did not .*join the run"):
        site.link.await_peers([Role.ROLLOUT, Role.TRAINER], 400.0)


def test_an_instruction_that_is_not_acknowledged_is_named_at_the_deadline(site: Site) -> None:
    site.join_deaf(Role.ROLLOUT)
    ask(site, what="sample groups 0-3")
    site.turn()
    site.clock.forward(ACK_S)
    with pytest.raises(WaitError, match=r"rollout\[0:0\] did not receive an instruction: sample groups 0-3"):
        site.turn()


def test_work_without_progress_is_named_at_the_deadline_and_progress_puts_the_deadline_off(site: Site) -> None:
    worker = site.join(Role.ROLLOUT)
    ask(site, what="sample groups 0-3")
    (wait,) = site.link.waits.open
    site.link.pump(lambda: wait.ack_by_s is None)
    first_due_s = wait.due_s
    site.clock.forward(SECTION_S / 2)
    worker.messages.progress += 1
    site.link.pump(lambda: wait.due_s > first_due_s)
    assert wait.due_s >= first_due_s + SECTION_S / 2
    due_s, heard_s = wait.due_s, site.link.heard_s(Role.ROLLOUT)
    site.clock.forward(SECTION_S / 2)
    site.link.pump(lambda: site.link.heard_s(Role.ROLLOUT) != heard_s)
    assert wait.due_s == due_s, "a sign of life is no progress"
    site.clock.forward(SECTION_S / 2)
    with pytest.raises(WaitError, match="did not finish: sample groups 0-3.*no progress for 1000.0 s, 150"):
        site.turn()


def test_a_group_of_a_unit_puts_the_deadline_of_the_unit_off(site: Site) -> None:
    worker = site.join(Role.ROLLOUT)
    seen = Seen(site, GroupFinished)
    cause = ask(site)
    (wait,) = site.link.waits.open
    site.link.pump(lambda: wait.ack_by_s is None)
    due_s = wait.due_s
    site.clock.forward(SECTION_S / 2)
    worker.send(group_finished(cause))
    site.link.pump(lambda: len(seen) == 1)
    assert wait.due_s >= due_s + SECTION_S / 2
    assert wait.ack_by_s is None
    assert site.link.waits.open == [wait], "the unit itself is still awaited"


# --- ends ---------------------------------------------------------------------------------------------------------


REPORT = ErrorReport(kind="EngineError", what="out of ideas", got="none", needed="one", do="Think.", where="unit 3")


def test_a_dead_worker_is_named_with_how_it_ended_what_it_owed_and_its_log(site: Site) -> None:
    worker = site.join(Role.ROLLOUT)
    gone: list[tuple[Peer, str]] = []
    site.link.on_gone = lambda peer, how: gone.append((peer, how))
    ask(site, what="sample groups 0-3")
    ask(site, what="digest the weights")
    site.supervisor.ends[Role.ROLLOUT] = "killed by SIGKILL"
    site.soon(worker.die)
    with pytest.raises(ServiceDied) as caught:
        site.link.pump(lambda: False)
    text = str(caught.value)
    assert text.startswith("rollout[0:0]: the rollout service died; got killed by SIGKILL; needed ")
    assert "sample groups 0-3, digest the weights" in text
    assert "/run/logs/rollout.log" in text
    assert [(peer.role, how) for peer, how in gone] == [(Role.ROLLOUT, "killed by SIGKILL")]
    assert Role.ROLLOUT not in site.link.peers
    assert site.link.waits.open == []


def test_a_child_that_dies_before_it_joins_is_named_too(site: Site) -> None:
    site.supervisor.ends[Role.TRAINER] = "exit code 1"
    with pytest.raises(ServiceDied, match="trainer service died; got exit code 1"):
        site.link.died(Role.TRAINER)


def test_an_instruction_for_a_worker_whose_socket_is_gone_is_a_death_and_not_a_fault_of_the_message(site: Site) -> None:
    site.join(Role.ROLLOUT).messages.stop()
    site.supervisor.ends[Role.ROLLOUT] = "killed by SIGKILL"

    def go_on() -> None:
        """The end of the socket reaches the coordinator's in a moment."""
        for _ in range(1000):
            ask(site, what="the last straw")
            site.hub.poll(0.01)

    with pytest.raises(ServiceDied, match="rollout service died; got killed by SIGKILL; needed .*the last straw"):
        go_on()


def test_the_death_of_a_child_that_was_replaced_meanwhile_is_not_that_of_the_new_one(site: Site) -> None:
    """Both may have become readable in one turn of the loop: the last answer of the old one, and its end."""
    ours, theirs = socket.socketpair()
    site.join(Role.REWARD)
    with ours, theirs:
        site.link.watch(ours.fileno(), "death of reward", lambda: site.link.died(Role.REWARD))
        theirs.send(b"x")
        site.turn()
    assert Role.REWARD in site.link.peers


@pytest.mark.parametrize("after_end", [False, True], ids=["sent first", "read after the end of the stream"])
def test_the_last_words_of_a_dying_worker_say_why(site: Site, after_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.link.LAST_WORDS_S", 5.0)
    worker = site.join(Role.ROLLOUT)
    ask(site)

    def end() -> None:
        if not after_end:
            worker.send(Failed(cause=1, error=REPORT))
        worker.die()
        if after_end:
            site.soon(lambda: worker.send(Failed(cause=1, error=REPORT)))

    site.soon(end)
    with pytest.raises(WorkerFailed, match="unit 3: out of ideas; got none; needed one. Think.") as caught:
        site.link.pump(lambda: False)
    assert (caught.value.peer.role, caught.value.report) == (Role.ROLLOUT, REPORT)


def test_a_worker_that_fails_but_stays_ends_the_run_too(site: Site) -> None:
    site.join(Role.ROLLOUT).send(Failed(cause=1, error=REPORT))
    with pytest.raises(WorkerFailed, match="out of ideas"):
        site.link.pump(lambda: False)


def test_a_worker_that_was_told_to_leave_from_outside_stops_the_run(site: Site) -> None:
    site.join(Role.ROLLOUT).send(Leaving(reason="SIGTERM"))
    with pytest.raises(StopRun, match=r"stopped by SIGTERM to rollout\[0:0\]") as caught:
        site.link.pump(lambda: False)
    assert caught.value.exit_code == 0


def test_a_worker_that_leaves_and_dies_stops_the_run_and_is_no_error(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex_coordinator.processes.link.LAST_WORDS_S", 5.0)
    worker = site.join(Role.ROLLOUT)
    site.soon(worker.die)
    site.soon(lambda: site.soon(lambda: worker.send(Leaving(reason="SIGTERM"))))
    with pytest.raises(StopRun, match="SIGTERM"):
        site.link.pump(lambda: False)


def test_the_first_stop_counts_and_ends_the_pump_at_its_next_turn(site: Site) -> None:
    site.link.stop(None)
    site.link.stop(StopRun(source="SIGINT", exit_code=130))
    site.link.stop(StopRun(source="http", exit_code=0))
    with pytest.raises(StopRun, match="SIGINT"):
        site.link.pump(lambda: False)


def test_an_atomic_section_is_finished_before_a_stop_but_not_before_a_death(site: Site) -> None:
    worker = site.join(Role.ROLLOUT)
    seen = Seen(site, DigestReply)
    site.link.begin_atomic()
    ask(site)
    site.link.stop(StopRun(source="SIGINT", exit_code=130))
    answer(worker)
    site.link.pump(lambda: len(seen) == 1)
    site.turn()
    site.link.end_atomic()
    with pytest.raises(StopRun):
        site.turn()
    site.link.begin_atomic()
    worker.die()
    with pytest.raises(ServiceDied):
        site.link.pump(lambda: False)


def test_a_stop_does_not_wait_for_ever_for_an_atomic_section(site: Site) -> None:
    site.link.begin_atomic()
    site.link.stop(StopRun(source="SIGINT", exit_code=130))
    site.turn()
    site.clock.forward(PATIENCE_S)
    with pytest.raises(StopRun):
        site.turn()


def test_everybody_is_told_to_leave_and_whoever_does_not_is_named(site: Site) -> None:
    rollout, prefix = site.join(Role.ROLLOUT), site.join(Role.PREFIX)
    ask(site)
    rollout.next()
    site.link.leave_all("the run ended")
    assert site.link.waits.open == []
    for worker in (rollout, prefix):
        assert worker.next() == Leave(reason="the run ended")
    rollout.die()
    assert [peer.role for peer in site.link.await_ends(0.2, lambda: False)] == [Role.PREFIX]


def test_a_worker_that_is_gone_does_not_keep_the_others_from_being_told(site: Site) -> None:
    rollout, prefix = site.join(Role.ROLLOUT), site.join(Role.PREFIX)
    site.hub.disconnect(site.link.peers[Role.ROLLOUT])
    rollout.messages.stop()
    site.link.leave_all("the run ended")
    assert isinstance(prefix.next(), Leave)


def test_a_dismissed_worker_leaves_the_rest_is_heard_later_and_another_one_takes_its_place(site: Site) -> None:
    rollout, prefix = site.join(Role.ROLLOUT), site.join(Role.PREFIX)
    before = site.link.peers[Role.ROLLOUT]
    site.supervisor.ends[Role.ROLLOUT] = "exit code 0"  # as soon as it is asked: it has obeyed
    rollout.send(Failed(cause=1, error=ErrorReport(kind="WaitError", what="as I go")))
    ask(site, Role.PREFIX)
    answer(prefix)
    site.link.dismiss(Role.ROLLOUT, before.device, "another one comes", SECTION_S)
    assert rollout.next() == Leave(reason="another one comes")
    site.supervisor.ends.clear()
    assert Role.ROLLOUT not in site.link.peers
    heard: list[DigestReply] = []
    site.link.on(DigestReply, lambda _, message: heard.append(message))
    rollout.die()
    site.link.pump(lambda: bool(heard))
    site.hub.expect(Role.ROLLOUT, before.device, 2, exact=True)
    site.clock.forward(SECTION_S / 2)
    site.join(Role.ROLLOUT, incarnation=2)
    site.link.pump(lambda: Role.ROLLOUT in site.link.peers)
    assert site.link.peers[Role.ROLLOUT].incarnation == 2
    heard_s = site.link.heard_s(Role.ROLLOUT)
    assert heard_s is not None, "its greeting counts, or one that never speaks would look well"
    assert site.clock() - heard_s < SECTION_S / 4, "and not what the one before it said"


def test_a_worker_that_does_not_leave_when_it_is_dismissed_is_not_waited_for_for_ever(site: Site) -> None:
    rollout = site.join(Role.ROLLOUT)
    peer = site.link.peers[Role.ROLLOUT]
    ask(site)
    site.link.dismiss(Role.ROLLOUT, peer.device, "another one comes", 0.1)
    assert site.link.waits.open == []
    assert Role.ROLLOUT not in site.link.peers
    rollout.send(Failed(cause=1, error=ErrorReport(kind="WaitError", what="still here")))
    site.turn()  # nobody listens


# --- descriptors --------------------------------------------------------------------------------------------------


def test_a_watched_descriptor_calls_its_handler_until_it_is_unwatched(site: Site) -> None:
    ours, theirs = socket.socketpair()
    calls: list[bytes] = []
    with ours, theirs:
        site.link.watch(ours.fileno(), "test", lambda: calls.append(os.read(ours.fileno(), 1)))
        theirs.send(b"ab")
        site.link.pump(lambda: len(calls) == 2)
        assert calls == [b"a", b"b"]
        site.link.unwatch(ours.fileno(), "test")
        theirs.send(b"c")
        turns: list[int] = []
        site.link.after_turn = lambda: turns.append(1)
        site.join(Role.ROLLOUT)
        assert turns
        assert len(calls) == 2


def test_what_others_say_while_a_worker_dies_is_heard_afterwards(site: Site) -> None:
    """A run can go on after a death: that of a newcomer which was to take somebody's place."""
    rollout, prefix = site.join(Role.ROLLOUT), site.join(Role.PREFIX)
    seen = Seen(site, DigestReply)
    ask(site, Role.PREFIX)
    rollout.die()
    site.soon(lambda: answer(prefix, "p"))
    with pytest.raises(ServiceDied):
        site.link.pump(lambda: False)
    site.link.pump(lambda: len(seen) == 1)
    assert [(role, m.digest) for role, m in seen.messages] == [(Role.PREFIX, "p")]


def test_two_that_died_together_are_not_waited_for_at_the_end(site: Site) -> None:
    workers = [site.join(Role.ROLLOUT), site.join(Role.PREFIX)]
    for worker in workers:
        worker.die()
    with pytest.raises(ServiceDied):
        site.link.pump(lambda: False)
    site.link.leave_all("the run failed")
    assert site.link.await_ends(2.0, lambda: False) == []


def test_a_process_whose_stream_ends_after_it_is_one_death(site: Site) -> None:
    rollout = site.join(Role.ROLLOUT)
    site.supervisor.ends[Role.ROLLOUT] = "killed by SIGKILL"
    with pytest.raises(ServiceDied, match="killed by SIGKILL"):
        site.link.died(Role.ROLLOUT)
    rollout.die()
    for _ in range(3):
        site.turn()


# --- all workers are replaced -------------------------------------------------------------------------------------


def test_nothing_of_workers_that_are_replaced_is_heard_or_awaited(site: Site) -> None:
    rollout, prefix = site.join(Role.ROLLOUT), site.join(Role.PREFIX)
    seen = Seen(site, DigestReply)
    ask(site)
    ask(site, Role.PREFIX)
    old = rollout.next().cause
    site.link.begin_atomic()
    site.link.forget_workers()
    assert not site.link.waits.open
    assert not site.link.peers
    rollout.send(DigestReply(cause=old, version=1, digest="late"))
    prefix.send(Failed(cause=0, error=ErrorReport(kind="OSError", what="late")))
    rollout.die()
    prefix.die()
    site.hub.expect(Role.ROLLOUT, Device(), 2, exact=True)
    new = site.join(Role.ROLLOUT, incarnation=2)
    ask(site)
    answer(new, "new")
    site.link.pump(lambda: len(seen) == 1)
    assert [message.digest for _, message in seen.messages] == ["new"]


def test_what_the_reward_child_was_asked_for_them_is_dropped_when_it_comes(site: Site) -> None:
    reward = site.join(Role.REWARD)
    seen = Seen(site, GroupRewarded)
    first = site.link.ask(Role.REWARD, _reward, "reward group 1", SECTION_S)
    site.link.forget_workers()
    assert not site.link.waits.open
    second = site.link.ask(Role.REWARD, _reward, "reward group 1", SECTION_S)
    for cause in (first, second):
        reward.send(_rewarded(cause))
    site.link.pump(lambda: len(seen) == 1)
    assert [message.cause for _, message in seen.messages] == [second]


def test_what_the_input_child_was_asked_is_still_awaited(site: Site) -> None:
    site.join(Role.INPUT)
    cause = site.link.ask(
        Role.INPUT, lambda cause: WriteInputs(cause=cause, step=0, segment=SEGMENT), "write inputs", SECTION_S
    )
    site.link.forget_workers()
    assert [wait.cause for wait in site.link.waits.open] == [cause]


def test_workers_that_never_joined_are_forgotten_too(site: Site) -> None:
    """Their stream is there, and would tell of an end."""
    options = WorkerOptions(
        role=Role.PREFIX, run_dir=site.run_dir, device=Device(), incarnation=1, connect_deadline_s=DEADLINE_S
    )
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(connect_stream, options)
        while not coming.done():
            site.turn()
        _, stream, _, _ = coming.result()
    site.link.forget_workers()
    stream.close()
    site.turn()
    assert Role.PREFIX not in site.link.peers
