"""What replacing a service does where a process cannot be started: the run keeps the program that it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollplex.errors import ConfigError, StateError
from rollplex.journal.events import ServiceReady, SwapRefused
from rollplex.protocol.common import Device, DigestReply, Drained, Loaded, Role
from rollplex.protocol.trainer import Standing
from rollplex_coordinator.decisions.swap import TAKEOVER, Stage
from rollplex_coordinator.decisions.work import Work
from rollplex_coordinator.processes.link import WorkerDied
from rollplex_coordinator.swapping import Swapping

OLD, NEW = ("old",), ("new", "--fast")
BYTES = 64


class Site:
    """A node whose one reader answers as it should; `gone`: programs that cannot be started."""

    def __init__(self, run_dir: Path, gone: tuple[str, ...] = ()) -> None:
        self.program: tuple[str, ...] = OLD
        self.digest = "d"
        """Of the weights as they are found."""
        self.gone = gone
        self.told: list[str] = []
        self.events: list[Any] = []
        self.digesting = 2
        """Turns until the digests that somebody asked for are there."""
        peer = SimpleNamespace(incarnation=3)
        link = SimpleNamespace(
            peers={Role.ROLLOUT: peer, Role.TRAINER: peer},
            peer=lambda role: peer,
            waits=SimpleNamespace(open=[]),
            pump=self._pump,
            call=lambda role, make, what, *parts: self._say(*self._answer(what)),
            await_peers=lambda roles, deadline_s: None,
            call_team=lambda *parts: self._say("load", _loaded()),
            call_many=lambda told, *parts: {role: DigestReply(cause=1, version=0, digest=self.digest) for role in told},
        )
        self.node = SimpleNamespace(
            run_dir=run_dir,
            link=link,
            fleet=SimpleNamespace(single=True),
            external_workers=False,
            gpus=None,
            config=SimpleNamespace(
                rollout=SimpleNamespace(engine="transformers"),
                http=SimpleNamespace(is_loopback=True),
                deadlines=SimpleNamespace(unit_s=1.0, start_s=1.0, load_s=1.0, leave_s=1.0),
            ),
            record=SimpleNamespace(version=0, append=self.events.append),
            supervisor=SimpleNamespace(command=lambda role: self.program, use=self._use),
            start=self._start,
            dismiss=lambda role, reason: self.told.append("dismiss"),
            loads={Role.ROLLOUT: (None, None)},
        )
        readers: list[str] = []
        gate = SimpleNamespace(
            remove_reader=lambda role: readers.remove(role) if role in readers else None,
            register_reader=lambda role, **given: readers.append(role),
        )
        self.readers = readers
        site = self

        class Control(SimpleNamespace):
            @property
            def digesting(self) -> bool:
                return site.digesting > 0

        self.control = Control(gate=gate)
        self.loads: list[Any] = []
        """What trainers were told to find."""
        self.context = SimpleNamespace(
            gate=gate,
            sizes=SimpleNamespace(table=SimpleNamespace(total_bytes=BYTES)),
            loads=SimpleNamespace(again=self._again),
        )
        self.swapping = Swapping(cast("Any", self.node), Work(3, serve=True), cast("Any", self.control))

    def _answer(self, what: str) -> tuple[str, Any]:
        if "digest" in what:
            return "digest", DigestReply(cause=1, version=0, digest=self.digest)
        return "drain", Drained(cause=1, version=0)

    def _again(self, standing: dict[Device, Standing], _meets: object) -> SimpleNamespace:
        self.loads += standing.values()
        return SimpleNamespace(all=[(SimpleNamespace(role=Role.TRAINER), None)])

    def _pump(self, until: Any) -> None:
        while not until():
            self.digesting -= 1

    def _say(self, what: str, answer: Any) -> Any:
        self.told.append(what)
        assert not self.digesting, "nobody else's answers are under way"
        return answer

    def _use(self, role: Role, command: tuple[str, ...]) -> None:
        self.program = tuple(command)

    def _start(self, role: Role) -> None:
        if self.program[0] in self.gone:
            raise ConfigError("the program of rollout cannot be started", got="no such file", where=self.program[0])
        self.told.append(f"start {self.program[0]}")


def _loaded() -> Loaded:
    return Loaded(cause=1, table_bytes=BYTES, on_policy=True)


def test_a_word_that_no_process_can_have_is_refused_and_another_replacement_may_follow(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with pytest.raises(StateError, match="cannot be started; got embedded null byte; needed a program"):
        site.swapping.ask(Role.ROLLOUT, ["python\0", "x"])
    newest = site.swapping.swaps.newest
    assert newest is not None
    assert (newest.stage, newest.case) == (Stage.REFUSED, "conformance")
    assert [type(event) for event in site.events] == [SwapRefused]
    assert site.swapping.swaps.ask(Role.ROLLOUT, NEW, stopping=False).stage is Stage.TESTING


def test_a_program_that_is_gone_when_it_is_to_take_the_place_gives_it_back(tmp_path: Path) -> None:
    site = Site(tmp_path, gone=("new",))
    site.swapping.swaps.ask(Role.ROLLOUT, NEW, stopping=False)
    site.swapping.swaps.passed()
    site.swapping.at_border(cast("Any", site.context))
    newest = site.swapping.swaps.newest
    assert newest is not None
    assert (newest.stage, newest.case) == (Stage.REFUSED, TAKEOVER)
    assert "no such file" in newest.got
    assert site.program == OLD
    assert site.told == ["drain", "dismiss", "dismiss", "start old", "load"]
    assert site.readers == [Role.ROLLOUT]
    assert [type(event) for event in site.events] == [ServiceReady, SwapRefused]
    assert site.control.gate is site.context.gate


def test_a_trainer_is_not_drained_and_the_one_after_it_is_told_what_stands(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.swapping.swaps.ask(Role.TRAINER, NEW, stopping=False)
    site.swapping.swaps.passed()
    site.swapping.at_border(cast("Any", site.context))
    assert site.told == ["digest", "dismiss", "start new", "load"]
    assert site.loads == [Standing(version=0, digest="d")]
    assert site.readers == [], "the gate counts no trainer"
    site.swapping.stay(cast("Any", site.context), raising(died(Role.TRAINER)))
    assert site.loads == [Standing(version=0, digest="d")] * 2, "also the old one, after it"
    assert site.told[4:] == ["dismiss", "start old", "load"]
    assert (site.program, site.readers) == (OLD, [])


def test_a_trainer_that_changes_what_stands_ends_the_run_if_the_old_one_does_not_go_on_with_it(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.swapping.swaps.ask(Role.TRAINER, NEW, stopping=False)
    site.swapping.swaps.passed()
    start = site.node.start

    def spoil(role: Role) -> None:
        start(role)
        site.digest = "other"

    site.node.start = spoil
    with pytest.raises(StateError, match="the trainer sees other weights; got version 0, other; needed version 0, d"):
        site.swapping.at_border(cast("Any", site.context))
    assert site.told == ["digest", "dismiss", "start new", "load", "dismiss", "start old", "load"]


def test_the_old_program_stays_until_digests_that_are_under_way_have_come(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.swapping.swaps.ask(Role.ROLLOUT, NEW, stopping=False)
    site.swapping.swaps.passed()
    site.swapping.at_border(cast("Any", site.context))
    assert site.digesting == 0
    newest = site.swapping.swaps.newest
    assert newest is not None
    assert (newest.stage, newest.step) == (Stage.SWAPPED, 0)


def died(role: Role) -> WorkerDied:
    said = f"the {role} service died"
    return WorkerDied(said, role=role, device=Device(), got="exit code 7", needed="it", do="Look.", where=str(role))


def raising(error: Exception) -> Callable[[], None]:
    def wait() -> None:
        raise error

    return wait


def swapped(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    site.swapping.swaps.ask(Role.ROLLOUT, NEW, stopping=False)
    site.swapping.swaps.passed()
    site.swapping.at_border(cast("Any", site.context))
    assert site.program == NEW
    return site


def test_a_newcomer_that_ends_while_nothing_is_asked_of_it_gives_its_place_back(tmp_path: Path) -> None:
    site = swapped(tmp_path)
    site.swapping.stay(cast("Any", site.context), raising(died(Role.ROLLOUT)))
    newest = site.swapping.swaps.newest
    assert newest is not None
    assert (newest.stage, newest.case, newest.step) == (Stage.REFUSED, TAKEOVER, None)
    assert "exit code 7" in newest.got
    assert (site.program, site.readers) == (OLD, [Role.ROLLOUT])
    assert type(site.events[-1]) is SwapRefused
    assert site.control.gate is site.context.gate
    with pytest.raises(WorkerDied):
        site.swapping.stay(cast("Any", site.context), raising(died(Role.ROLLOUT)))


def test_the_end_of_another_service_or_after_an_iteration_has_begun_is_that_of_the_run(tmp_path: Path) -> None:
    site = swapped(tmp_path)
    with pytest.raises(WorkerDied):
        site.swapping.stay(cast("Any", site.context), raising(died(Role.PREFIX)))
    site.swapping.begun()
    with pytest.raises(WorkerDied):
        site.swapping.stay(cast("Any", site.context), raising(died(Role.ROLLOUT)))
    assert site.program == NEW


def test_who_has_been_asked_to_be_replaced_has_no_older_program_to_give_its_place_to(tmp_path: Path) -> None:
    site = swapped(tmp_path)
    with pytest.raises(StateError, match="cannot be started"):
        site.swapping.ask(Role.ROLLOUT, ["python\0"])
    with pytest.raises(WorkerDied):
        site.swapping.stay(cast("Any", site.context), raising(died(Role.ROLLOUT)))
