"""The line to several processes of a role, over real sockets: one instruction, one answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollplex.config import from_mapping
from rollplex.errors import ProtocolError, ServiceDied, StateError, WaitError
from rollplex.protocol.common import (
    Device,
    DigestReply,
    DigestRequest,
    Drain,
    Drained,
    ErrorReport,
    Failed,
    Leaving,
    Role,
)
from rollplex_coordinator.decisions.fleet import fleet_of
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.processes.link import WorkerFailed
from rollplex_coordinator.processes.stop import StopRun
from support.sockets import Clock, Site, open_hub

SECTION_S = 1000.0
REPORT = ErrorReport(kind="EngineError", what="what really failed", got="a number that is not finite")
LOST = ErrorReport(kind="WaitError", what="A collective among ranks has failed", got="a closed connection")
FLEET = fleet_of(
    from_mapping(
        {
            "model": {"path": "model"},
            "data": {"path": "rows.jsonl"},
            "rewards": {"functions": [{"function": "score.py:score"}]},
            "parallel": {"devices": 2, "training": 2},
        }
    )
)
(TEAM,) = FLEET.prefixes
ENGINES = FLEET.engines
SECOND = Device(index=1)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A link that expects two devices: one team of prefixes, two engines."""
    run_dir = tmp_path / "run"
    with open_hub(run_dir, Role, fleet=FLEET) as hub, Site(run_dir, hub, Clock(), FLEET) as site:
        yield site


def drain(cause: int, rank: int) -> Drain:
    return Drain(cause=cause, version=rank)


def test_each_rank_is_told_its_own_and_the_answer_comes_once_from_the_leader(site: Site) -> None:
    first, second = site.join_all(Role.PREFIX)
    seen: list[tuple[Peer, Drained]] = []
    heard: list[Peer] = []
    site.link.on(Drained, lambda peer, message: seen.append((peer, message)))
    cause = site.link.ask_team(TEAM, drain, "drain", SECTION_S, heard.append)
    told = [worker.next() for worker in (first, second)]
    assert [(message.cause, message.version) for message in told] == [(cause, 0), (cause + 1, 1)]
    assert [wait.peer for wait in site.link.waits.open] == ["prefix[0:0]", "prefix[0:1]"]
    second.send(Drained(cause=cause + 1, version=5))
    site.link.pump(lambda: bool(heard))
    assert not seen
    first.send(Drained(cause=cause, version=5))
    site.link.pump(lambda: bool(seen))
    ((peer, message),) = seen
    assert (str(peer), message.cause, message.version) == ("prefix[0:0]", cause, 5)
    assert site.link.team_of(heard[0]) == TEAM
    assert site.link.waits.open == []


def test_ranks_that_disagree_end_the_run(site: Site) -> None:
    workers = site.join_all(Role.PREFIX)
    site.link.on(Drained, lambda *_: None)
    cause = site.link.ask_team(TEAM, drain, "drain", SECTION_S)
    for rank, worker in enumerate(workers):
        worker.send(Drained(cause=cause + rank, version=rank))
    with pytest.raises(StateError, match=r"prefix\[0:0, 0:1\].*Drained.version: 1 from device 0:1; needed 0"):
        site.link.pump(lambda: False)


def test_several_teams_are_called_at_once_and_answer_in_their_order(site: Site) -> None:
    workers = site.join_all(Role.ROLLOUT)

    def answer(at: int) -> None:
        workers[at].send(Drained(cause=workers[at].next().cause, version=at))

    site.soon(lambda: answer(1))
    site.soon(lambda: answer(0))
    answers = site.link.call_teams([(team, drain) for team in ENGINES], "drain", SECTION_S, Drained)
    assert [message.version for message in answers] == [0, 1]


def test_of_answers_about_a_device_there_is_one_for_each_process(site: Site) -> None:
    workers = site.join_all(Role.PREFIX)
    for at, worker in enumerate(workers):
        site.soon(
            lambda at=at, worker=worker: worker.send(
                DigestReply(cause=worker.next().cause, version=1, digest=f"of {at}")
            )
        )
    answers = site.link.call_teams(
        [(TEAM, lambda cause, _: DigestRequest(cause=cause))], "digest", SECTION_S, DigestReply
    )
    assert [message.digest for message in answers] == ["of 0", "of 1"]


def test_a_role_of_several_processes_is_not_one_worker(site: Site) -> None:
    site.join_all(Role.PREFIX)
    with pytest.raises(ProtocolError, match="prefix: cannot instruct a role of several processes as one"):
        site.link.ask(Role.PREFIX, lambda cause: drain(cause, 0), "drain", SECTION_S)
    with pytest.raises(ProtocolError, match=r"rollout\[0:0\]: cannot instruct a worker that has not joined"):
        site.link.ask_team(ENGINES[0], drain, "drain", SECTION_S)


def test_everybody_of_a_role_is_awaited_and_the_missing_one_is_named(site: Site) -> None:
    site.join_all(Role.INPUT)
    site.link.after_turn = lambda: site.clock.forward(500.0)
    with pytest.raises(WaitError, match=r"prefix\[0:0\] did not .*join the run"):
        site.link.await_peers([Role.INPUT, Role.PREFIX], 400.0)


def test_a_death_names_the_device_and_its_log(site: Site) -> None:
    _, second = site.join_all(Role.PREFIX)
    site.link.on(Drained, lambda *_: None)
    site.link.ask_team(TEAM, drain, "drain", SECTION_S)
    site.supervisor.ends[Role.PREFIX, SECOND] = "killed by SIGKILL"
    site.soon(second.die)
    with pytest.raises(ServiceDied, match=r"prefix\[0:1\]: the prefix service of device 0:1 died; got killed") as got:
        site.link.pump(lambda: False)
    assert "/run/logs/prefix-1.log" in str(got.value)
    assert site.link.peer(Role.PREFIX, SECOND) is None
    assert site.link.peer(Role.PREFIX) is not None


def test_the_error_of_one_that_lost_another_names_the_other_s_death(site: Site) -> None:
    first, _ = site.join_all(Role.PREFIX)
    first.send(Failed(cause=1, error=LOST))
    site.soon(lambda: site.supervisor.ends.update({(Role.PREFIX, SECOND): "killed by SIGKILL"}))
    with pytest.raises(ServiceDied, match=r"prefix service of device 0:1 died; got killed by SIGKILL"):
        site.link.pump(lambda: False)


def test_one_that_aborted_because_another_was_lost_is_not_the_reason_of_the_other_s_error(site: Site) -> None:
    _, second = site.join_all(Role.PREFIX)
    site.supervisor.ends[Role.PREFIX] = "killed by SIGABRT"
    second.send(Failed(cause=1, error=REPORT))
    with pytest.raises(WorkerFailed, match="what really failed"):
        site.link.pump(lambda: False)
    second.send(Failed(cause=1, error=LOST))
    with pytest.raises(ServiceDied, match="device 0:0 died; got killed by SIGABRT"):
        site.link.pump(lambda: False)


def test_an_error_that_has_no_death_behind_it_is_told_as_it_is(site: Site) -> None:
    _, second = site.join_all(Role.PREFIX)
    site.supervisor.ends[Role.PREFIX] = "exit code 1"
    second.send(Failed(cause=1, error=REPORT))
    with pytest.raises(WorkerFailed, match="what really failed") as caught:
        site.link.pump(lambda: False)
    assert str(caught.value.peer) == "prefix[0:1]"


def test_a_sigterm_from_outside_names_the_device(site: Site) -> None:
    _, second = site.join_all(Role.ROLLOUT)
    second.send(Leaving(reason="SIGTERM"))
    with pytest.raises(StopRun, match=r"SIGTERM to rollout\[0:1\]"):
        site.link.pump(lambda: False)


def test_a_rank_that_hangs_is_named_and_not_the_one_that_waits_for_it(site: Site) -> None:
    workers = site.join_all(Role.PREFIX)
    site.link.on(Drained, lambda *_: None)
    site.link.ask_team(TEAM, drain, "drain", SECTION_S)
    site.link.pump(lambda: all(wait.ack_by_s is None for wait in site.link.waits.open))
    workers[1].messages.stop()
    site.clock.forward(SECTION_S - 1.0)
    heard_s = site.link.heard_s(Role.PREFIX)
    site.link.pump(lambda: site.link.heard_s(Role.PREFIX) != heard_s)
    with pytest.raises(WaitError, match=r"prefix\[0:1\] did not finish: drain.*no sign of life"):
        site.link.pump(lambda: False)


@pytest.mark.parametrize("later", [False, True])
def test_of_two_errors_that_of_the_one_that_the_other_waited_for_is_told(site: Site, *, later: bool) -> None:
    first, second = site.join_all(Role.PREFIX)
    first.send(Failed(cause=1, error=LOST))

    def fail() -> None:
        second.send(Failed(cause=2, error=REPORT))

    site.soon(fail) if later else fail()
    with pytest.raises(WorkerFailed, match="what really failed") as caught:
        site.link.pump(lambda: False)
    assert str(caught.value.peer) == "prefix[0:1]"


def test_if_all_lost_each_other_the_first_is_told(site: Site) -> None:
    for worker in site.join_all(Role.PREFIX):
        worker.send(Failed(cause=1, error=LOST))
    with pytest.raises(WorkerFailed, match="A collective among ranks has failed"):
        site.link.pump(lambda: False)
