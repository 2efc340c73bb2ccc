"""The sittings that every role has: how a service joins, acknowledges, refuses and ends.

Owns the names and rules of these cases. A role's kit says what its instructions are and what their results should be
(`rollout`, `prefix`, `trainer`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from rollplex.conformance.judging import (
    require_alive,
    require_answers,
    require_frames,
    require_nothing_left,
    require_received,
)
from rollplex.conformance.sitting import BESIDE, Broken, Limits, Own, Sheet, Sitting, Violation
from rollplex.conformance.world import World
from rollplex.errors import BudgetError
from rollplex.protocol.common import (
    DigestReply,
    DigestRequest,
    Drain,
    Drained,
    Failed,
    Loaded,
    Role,
)
from rollplex.protocol.handshake import Reason, Refused

QUIET_S = 0.3
KILLED_S = 5.0

REFUSED: Final = {
    "hello": "its hello says the protocol, schema hash, role, device, incarnation and secret that it should",
    "handshake_secret": "refused for its secret, it reads the file again and tries again",
    "handshake_refused": "refused for its protocol, it ends with exit code 1 and does not try again",
}
BEGINNING: Final = {
    "handshake": "it says hello on the stream, and then on the ROUTER under its identity",
    "load": "it loads before anybody has filled the weights, and says how large the segment is",
}
WIRE: Final = {
    "received": "each instruction is acknowledged once and in time, also while it computes",
    "alive": "it sends Alive as often as Welcome says, and progress moves with the work",
    "answers": "each instruction has one answer, and nothing is answered that was not asked",
    "frames": "every frame can be read",
}
ENDING: Final = {
    "leave": "Leave ends it with exit code 0 in time",
    "leftovers": "it leaves no files, processes or named shared memory",
}
EARLY: Final = {"early": "an instruction before the one that loads is refused"}
VERSION: Final = {"version": "a unit for another version than the header's is refused, and nothing of it is done"}
LEASE: Final = {"lease": "a unit whose lease is too small for what it would hold is refused by BudgetError"}
DRAIN: Final = {"drain": "after Drained no unit is begun until Committed"}
DOUBLED: Final = {"doubled": "an instruction that comes twice is not carried out twice"}
EOF: Final = {"eof": "the end of the stream ends it within the grace time, with exit code 3"}
TERM: Final = {"sigterm": "SIGTERM: it says Leaving, waits for Leave, and ends with exit code 0"}
KILL: Final = {"kill": "killed, its stream ends at once, and nothing of it is left"}


class Kit(Protocol):
    """One role: its instructions, and the cases of its own. Each kit has segments of its own."""

    role: Role
    rules: Mapping[str, str]
    """Of `run`, in the order in which they are judged."""
    unit_answer: type
    version: int
    """Of the weights, when they are loaded."""

    @property
    def own(self) -> Sequence[Own]:
        """Further sittings, which begin before the worker has joined."""
        ...

    def load(self, cause: int) -> Any:
        """The instruction that loads."""
        ...

    def fill(self) -> None:
        """What others do between the worker's Loaded and its first unit."""
        ...

    def unit(self, cause: int, *, version: int, lease_bytes: int | None = None) -> Any:
        """One unit of work. lease_bytes: None is what it needs."""
        ...

    def run(self, sitting: Sitting, sheet: Sheet) -> None:
        """The role's own cases, on a worker that has loaded."""
        ...


class Sittings:
    """The sittings of one role's test.

    Args:
        make: gives a kit with segments of its own.
    """

    def __init__(
        self, command: Sequence[str], world: World, make: Callable[[World], Kit], limits: Limits, sheet: Sheet
    ) -> None:
        self._command, self._world, self._make = command, world, make
        self._limits, self._sheet = limits, sheet

    def hold(self) -> None:
        """All of them, the quick ones first."""
        kit = self._make(self._world)
        self._refused(kit.role)
        self._sit(EARLY, self._early)
        self._sit(TERM, self._term)
        self._sit({**BEGINNING, **kit.rules, **WIRE, **ENDING}, self._main)
        self._sit(VERSION, self._version)
        if kit.role is Role.ROLLOUT:
            self._sit(LEASE, self._lease)
        if kit.role is not Role.TRAINER:
            self._sit(DRAIN, self._drain)
        for number, own in enumerate(kit.own):
            self._sit(own.rules, partial(self._own, number))
        self._sit(DOUBLED, self._doubled)
        self._sit(EOF, self._eof)
        self._sit(KILL, self._kill)

    # --- one each -------------------------------------------------------------------------------------------------

    def _refused(self, role: Role) -> None:
        if not self._sheet.wants(REFUSED):
            return
        secret = Refused(reason=Reason.SECRET, ours="", yours="", do="Read the secret file again")
        version = Refused(reason=Reason.PROTOCOL, ours="65535", yours="1", do="Run the same version everywhere")
        sitting = Sitting(role, self._command, {}, self._limits, (secret, version))
        needed = "exit code 1 soon after it was refused"

        def judge() -> None:
            with self._sheet.case("hello", REFUSED):
                sitting.until(lambda: bool(sitting.line.hellos), self._limits.start_s, "a hello on the stream")
                wrong = sitting.line.wrong_hello
                if wrong is not None:
                    raise Violation(f"another {wrong.reason}: {wrong.yours or 'not told'}", wrong.ours or "the file's")
            with self._sheet.case("handshake_secret", REFUSED):
                sitting.until(lambda: len(sitting.line.hellos) > 1, self._limits.start_s, "a second hello")
            with self._sheet.case("handshake_refused", REFUSED):
                sitting.exited(1, self._limits.grace_s, needed)

        self._held(sitting, REFUSED, judge)

    def _early(self, sitting: Sitting, kit: Kit) -> None:
        sitting.join()
        with self._sheet.case("early", EARLY):
            sitting.failure(sitting.tell(lambda cause: kit.unit(cause, version=kit.version)), forbidden=BESIDE)

    def _term(self, sitting: Sitting, _: Kit) -> None:
        sitting.join()
        with self._sheet.case("sigterm", TERM):
            sitting.term()

    def _main(self, sitting: Sitting, kit: Kit) -> None:
        sheet = self._sheet
        rules = {**BEGINNING, **kit.rules, **WIRE, **ENDING}
        with sheet.case("handshake", rules):
            sitting.join()
        with sheet.case("load", rules):
            self._load(sitting, kit)
        kit.run(sitting, sheet)
        sitting.rest(QUIET_S)
        for name, judge in (
            ("received", require_received),
            ("alive", require_alive),
            ("answers", require_answers),
            ("frames", require_frames),
        ):
            with sheet.case(name, rules):
                judge(sitting)
        with sheet.case("leave", rules):
            sitting.leave()
        with sheet.case("leftovers", rules):
            require_nothing_left(sitting)

    def _version(self, sitting: Sitting, kit: Kit) -> None:
        self._loaded(sitting, kit)
        with self._sheet.case("version", VERSION):
            sitting.failure(sitting.tell(lambda cause: kit.unit(cause, version=kit.version + 1)), forbidden=BESIDE)

    def _lease(self, sitting: Sitting, kit: Kit) -> None:
        self._loaded(sitting, kit)
        with self._sheet.case("lease", LEASE):
            cause = sitting.tell(lambda cause: kit.unit(cause, version=kit.version, lease_bytes=1))
            if self._needs_nothing(sitting, cause, kit):
                return
            error = sitting.failure(cause, forbidden=BESIDE).error
            if error.kind != BudgetError.__name__:
                raise Violation(f"Failed by {error.kind}: {error.what}", f"by {BudgetError.__name__}")

    def _needs_nothing(self, sitting: Sitting, cause: int, kit: Kit) -> bool:
        """An engine that keeps nothing may carry it out."""
        sitting.until(lambda: bool(sitting.of(cause, kit.unit_answer, Failed)), self._limits.answer_s, "an answer")
        return all(sum(held.size_bytes for held in done.held) <= 1 for done in sitting.of(cause, kit.unit_answer)) and (
            not sitting.of(cause, Failed)
        )

    def _drain(self, sitting: Sitting, kit: Kit) -> None:
        self._loaded(sitting, kit)
        with self._sheet.case("drain", DRAIN):
            sitting.ask(lambda cause: Drain(cause=cause, version=kit.version), Drained)
            sitting.failure(sitting.tell(lambda cause: kit.unit(cause, version=kit.version)), forbidden=BESIDE)

    def _own(self, number: int, sitting: Sitting, kit: Kit) -> None:
        kit.own[number].judge(sitting, self._sheet)

    def _doubled(self, sitting: Sitting, kit: Kit) -> None:
        self._loaded(sitting, kit)
        with self._sheet.case("doubled", DOUBLED):
            cause = sitting.tell(lambda cause: kit.unit(cause, version=kit.version))
            sitting.tell(lambda _: kit.unit(cause, version=kit.version), cause)
            sitting.answer(cause, kit.unit_answer)
            after = len(sitting.of(cause, *BESIDE))
            last = self._settled(sitting)
            again = [*sitting.of(cause, kit.unit_answer)[1:], *sitting.of(cause, *BESIDE)[after:]]
            if again:
                raise Violation(f"{type(again[0]).__name__} a second time; {last}", "the second refused, or ignored")

    def _settled(self, sitting: Sitting) -> str:
        """Wait until the last instruction has been dealt with: by the end of the process, or by what comes after it."""
        try:
            sitting.ask(lambda cause: DigestRequest(cause=cause), DigestReply)
        except Broken as end:
            return end.got
        return "and it goes on"

    def _eof(self, sitting: Sitting, kit: Kit) -> None:
        self._loaded(sitting, kit)
        with self._sheet.case("eof", EOF):
            sitting.tell(lambda cause: kit.unit(cause, version=kit.version))
            sitting.rest(QUIET_S / 10)
            sitting.line.end_stream()
            sitting.exited(3, self._limits.grace_s + 1.0, f"exit code 3 within {self._limits.grace_s:g} s")

    def _kill(self, sitting: Sitting, kit: Kit) -> None:
        self._loaded(sitting, kit)
        with self._sheet.case("kill", KILL):
            sitting.program.look()
            sitting.program.signal(signal.SIGKILL)
            needed = "the end of its stream, at once"
            sitting.until(lambda: sitting.line.ended_s is not None, KILLED_S, needed, ends=True)
            require_nothing_left(sitting)

    # --- how they are held ----------------------------------------------------------------------------------------

    def _load(self, sitting: Sitting, kit: Kit) -> None:
        loaded = sitting.ask(kit.load, Loaded)
        if loaded.table_bytes != self._world.table.total_bytes:
            raise Violation(f"table_bytes {loaded.table_bytes}", f"{self._world.table.total_bytes}, the segment's size")
        kit.fill()

    def _loaded(self, sitting: Sitting, kit: Kit) -> None:
        sitting.join()
        self._load(sitting, kit)

    def _sit(self, rules: Mapping[str, str], judge: Callable[[Sitting, Kit], None]) -> None:
        if not self._sheet.wants(rules):
            return
        kit = self._make(self._world)
        sitting = Sitting(kit.role, self._command, self._world.segments, self._limits)
        self._held(sitting, rules, lambda: judge(sitting, kit))

    def _held(self, sitting: Sitting, rules: Mapping[str, str], judge: Callable[[], None]) -> None:
        """A sitting that breaks off leaves the rest of its cases without a verdict of their own."""
        why = ""
        with sitting:
            try:
                judge()
            except Violation as found:
                why = f"{found.got}; needed {found.needed}"
            self._sheet.not_reached(rules, why or "the sitting broke off")
            if any(not verdict.passed for verdict in self._sheet.verdicts) and not self._sheet.log:
                self._sheet.log = sitting.program.log
