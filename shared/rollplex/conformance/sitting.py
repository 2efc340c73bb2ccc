"""One process under test, from its start to its end, and the verdicts that come of it.

Owns the numbering of instructions, every wait with its deadline, and turning what is wrong into verdicts. What is
asked, and what numbers an answer should have, is the cases' (`cases`).

    Violation   the case failed; the conversation can go on
    Broken      no conversation any more: what follows in this sitting is not reached
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from msgspec import Struct

from rollplex.conformance.line import Heard, Line
from rollplex.conformance.program import Program
from rollplex.conformance.report import Verdict
from rollplex.errors import ProtocolError, RollplexError
from rollplex.protocol.claim import claim
from rollplex.protocol.common import Alive, Failed, Leave, Leaving, Received, Role, SegmentRef
from rollplex.protocol.handshake import Refused, Welcome
from rollplex.protocol.rollout import GroupFinished, Prefilled

RUN_ID = "conformance"
TICK_S = 0.05
STAYS_S = 0.5
"""How long a worker is watched that should wait."""
BESIDE: Final = (Prefilled, GroupFinished)
"""What a unit sends before its answer."""
AnswerT = TypeVar("AnswerT")


class Limits(Struct, frozen=True, kw_only=True):
    """Deadlines of a test, seconds."""

    start_s: float = 120.0
    received_s: float = 5.0
    answer_s: float = 120.0
    grace_s: float = 5.0
    alive_every_s: float = 0.2


class Violation(Exception):  # noqa: N818 - a finding, not an error of ours
    """A rule was broken."""

    def __init__(self, got: str, needed: str) -> None:
        super().__init__(f"got {got}, needed {needed}")
        self.got, self.needed = got, needed


class Broken(Violation):
    """A rule was broken, and the process cannot be asked anything else."""


class Sheet:
    """The verdicts so far.

    Args:
        wanted: cases to judge; empty: all. A sitting without any of them does not take place.
        stop: end at the first failure.
    """

    def __init__(self, wanted: Sequence[str] = (), *, stop: bool = False) -> None:
        self.verdicts: list[Verdict] = []
        self.log = ""
        self._wanted, self._stop = frozenset(wanted), stop

    @property
    def over(self) -> bool:
        """Nothing more need be found out."""
        return self._stop and any(not verdict.passed for verdict in self.verdicts)

    def wants(self, rules: Mapping[str, str]) -> bool:
        """Whether a sitting with these cases takes place."""
        return not self.over and (not self._wanted or bool(self._wanted & set(rules)))

    @contextmanager
    def case(self, name: str, rules: Mapping[str, str]) -> Iterator[None]:
        """Judge what is done inside. Raises Broken on, after noting it."""
        try:
            yield
        except Violation as found:
            self._note(Verdict(case=name, rule=rules[name], passed=False, got=found.got, needed=found.needed))
            if isinstance(found, Broken) or self.over:
                raise Broken(found.got, found.needed) from found
        except (RollplexError, ArithmeticError, LookupError, ValueError) as error:
            got, needed = f"an answer that cannot be judged: {type(error).__name__}: {error}", "one of the protocol"
            self._note(Verdict(case=name, rule=rules[name], passed=False, got=got, needed=needed))
            raise Broken(got, needed) from error
        else:
            self._note(Verdict(case=name, rule=rules[name], passed=True))
        if self._wanted and self._wanted <= {verdict.case for verdict in self.verdicts}:
            raise Broken("nothing else is wanted", "")

    def not_reached(self, rules: Mapping[str, str], why: str) -> None:
        """Those of a sitting's cases that have no verdict."""
        done = {verdict.case for verdict in self.verdicts}
        for name, rule in rules.items():
            if name not in done:
                self._note(Verdict(case=name, rule=rule, passed=False, reached=False, got=why))

    def _note(self, verdict: Verdict) -> None:
        if not self._wanted or verdict.case in self._wanted:
            self.verdicts.append(verdict)


class Sitting:
    """A process of the program, and its coordinator's side.

    Args:
        segments: by number, what the worker may fetch.
        refusals: what the first hellos are answered with.
    """

    def __init__(
        self,
        role: Role,
        command: Sequence[str],
        segments: Mapping[int, tuple[int, SegmentRef]],
        limits: Limits,
        refusals: Sequence[Refused] = (),
    ) -> None:
        self.limits = limits
        self.sent_s: dict[int, float] = {}
        self._kinds: dict[int, str] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="rpx-"))
        self._claim = claim(self._folder / "run", RUN_ID)
        welcome = Welcome(
            run_id=RUN_ID,
            alive_every_s=limits.alive_every_s,
            received_within_s=limits.received_s,
            grace_s=limits.grace_s,
        )
        self.line = Line(self._claim, role, welcome, segments, refusals)
        try:
            self.program = Program(command, self._claim.run_dir.path, self._folder / "log")
        except BaseException:
            self._close()
            raise

    @property
    def run_dir(self) -> Path:
        return self._claim.run_dir.path

    def join(self) -> None:
        """Until it has shaken hands twice, or has said what it should not."""
        line, needed = self.line, "a hello on the stream, then on the ROUTER"
        self.until(lambda: line.joined_s is not None or line.wrong_hello is not None, self.limits.start_s, needed)
        if (wrong := line.wrong_hello) is not None:
            kind = Broken if line.joined_s is None else Violation
            raise kind(f"another {wrong.reason}: {wrong.yours or 'not told'}", wrong.ours or "the file's")

    def tell(self, make: Callable[[int], Any], cause: int | None = None) -> int:
        """Send an instruction; its cause. The same cause again is what a coordinator never does."""
        cause = len(self.sent_s) + 1 if cause is None else cause
        message = make(cause)
        self._kinds[cause] = type(message).__name__
        self.sent_s.setdefault(cause, time.monotonic())
        try:
            self.line.send(message)
        except ProtocolError as error:
            raise Broken(f"{error}; {self.program.how}", f"a worker that reads {self._kinds[cause]}") from error
        return cause

    def ask(self, make: Callable[[int], Any], kind: type[AnswerT]) -> AnswerT:
        """An instruction's answer."""
        return self.answer(self.tell(make), kind)

    def answer(self, cause: int, kind: type[AnswerT]) -> AnswerT:
        """Wait for the answer to `cause`.

        Raises:
            Broken: another one, none in time, Failed, or the process ended.
        """
        needed = f"{kind.__name__} for {self._kinds[cause]}"
        self.until(lambda: bool(self._final(cause)), self.limits.answer_s, needed)
        message = self._final(cause)[0]
        if isinstance(message, Failed):
            raise Broken(f"Failed: {message.error.kind}: {message.error.what} {message.error.got}", needed)
        if not isinstance(message, kind):
            raise Broken(type(message).__name__, needed)
        return message

    def failure(self, cause: int, *, forbidden: tuple[type, ...] = ()) -> Failed:
        """Wait for the refusal of `cause`, after which the process ends with exit code 1.

        Raises:
            Broken: it was carried out, or anything else.
        """
        needed = f"Failed for {self._kinds[cause]}, and exit code 1"
        self.until(lambda: bool(self._final(cause)) or bool(self.of(cause, *forbidden)), self.limits.answer_s, needed)
        if done := self.of(cause, *forbidden):
            raise Broken(f"it was carried out: {type(done[0]).__name__}", needed)
        message = self._final(cause)[0]
        if not isinstance(message, Failed):
            raise Broken(f"it was carried out: {type(message).__name__}", needed)
        self.exited(1, self.limits.grace_s, needed)
        return message

    def exited(self, code: int, within_s: float, needed: str) -> None:
        """Wait for the end of the process.

        Raises:
            Broken: it stays, or ends otherwise.
        """
        self.until(lambda: self.program.exit_code is not None, within_s, needed, ends=True)
        if self.program.exit_code != code:
            raise Broken(self.program.how, needed)

    def until(self, condition: Callable[[], bool], within_s: float, needed: str, *, ends: bool = False) -> None:
        """Turn until the condition holds.

        Args:
            ends: the end of the process is what is waited for.

        Raises:
            Broken: not in time, or the process ended first.
        """
        end_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end_s:
                raise Broken(f"nothing within {within_s:g} s; {self.program.how}", needed)
            dead = self.program.exit_code is not None
            self.line.turn(0.0 if dead else TICK_S)
            if dead and not ends and not condition():
                self.line.turn(TICK_S)  # its last words
                if not condition():
                    raise Broken(self.program.how, needed)

    def rest(self, seconds: float) -> None:
        """Take in what comes for so long."""
        end_s = time.monotonic() + seconds
        while (left := end_s - time.monotonic()) > 0:
            self.line.turn(min(left, TICK_S))

    def of(self, cause: int, *kinds: type) -> list[Any]:
        """Messages of these types for a cause."""
        found = [heard.message for heard in self.line.heard if isinstance(heard.message, kinds)]
        return [message for message in found if getattr(message, "cause", None) == cause]

    def leave(self) -> None:
        """Leave, and exit code 0 in time."""
        self.program.look()
        self.line.send(Leave(reason="the conformance test is over"))
        self.exited(0, self.limits.grace_s, "exit code 0 within the grace time of Leave")

    def term(self) -> None:
        """SIGTERM, Leaving, a while, Leave, exit code 0."""
        needed = "Leaving, and then to wait for Leave"
        self.program.signal(signal.SIGTERM)
        self.until(lambda: any(isinstance(h.message, Leaving) for h in self.line.heard), self.limits.grace_s, needed)
        self.rest(STAYS_S)
        if self.program.exit_code is not None:
            raise Broken(f"{self.program.how} before Leave", needed)
        self.leave()

    def answers(self) -> list[Heard]:
        """What answers instructions, Received apart."""
        return [h for h in self.line.heard if not isinstance(h.message, Received | Alive | Leaving)]

    def kind_of(self, cause: int) -> str | None:
        """The instruction that was sent under a cause."""
        return self._kinds.get(cause)

    def _final(self, cause: int) -> list[Any]:
        beside = (Received, Alive, Leaving, *BESIDE)
        found = [h.message for h in self.line.heard if not isinstance(h.message, beside)]
        return [message for message in found if message.cause == cause]

    def _close(self) -> None:
        self.line.close()
        self._claim.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.program.end()
        self._close()


@dataclass(frozen=True, kw_only=True)
class Own:
    """A sitting that one role has, with a process and segments of its own: its cases, and who judges them."""

    rules: Mapping[str, str]
    judge: Callable[[Sitting, Sheet], None]
