"""Whether a service may be replaced by another program while the run goes on, and how far that has got. Pure.

    asked ─► TESTING ──passed──► PASSED ──next border between iterations──► SWAPPED
                │                   │
                └──── a case failed ┴─ it does not join, load, see the weights, or is off policy ──► REFUSED
                                                       SWAPPED ──ended before its first iteration───────┘

Owns the states and what is refused from the start. One replacement is under way at a time. Starts no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from rollplex.errors import StateError
from rollplex.protocol.common import Role

TAKEOVER = "takeover"
"""The case of what went wrong after the conformance test."""


class Stage(StrEnum):
    """How far a replacement has got."""

    TESTING = "testing"
    PASSED = "passed"
    SWAPPED = "swapped"
    REFUSED = "refused"


class Swap(Struct, frozen=True, kw_only=True):
    """One replacement."""

    role: Role
    command: tuple[str, ...]
    stage: Stage
    case: str = ""
    """Of the conformance test, or TAKEOVER: where it was refused."""
    got: str = ""
    needed: str = ""
    step: int | None = None
    """The first iteration that the newcomer takes part in."""

    @property
    def under_way(self) -> bool:
        return self.stage in {Stage.TESTING, Stage.PASSED}


class Surroundings(Struct, frozen=True, kw_only=True):
    """What decides whether this run can replace services at all."""

    single: bool
    """One device."""
    external_workers: bool
    """Somebody else starts them."""
    gpu: bool
    pools: bool
    """The rollout's engine keeps a pool of K/V for the whole run."""
    remote: bool
    """Other machines reach the control API, which names the program."""


class Swaps:
    """The replacements of one run; the newest is `newest`."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.newest: Swap | None = None
        self._surroundings = surroundings

    def ask(self, role: Role, command: Sequence[str], *, stopping: bool) -> Swap:
        """A replacement is wanted: its test begins.

        Raises:
            StateError: this service, or any of this run, cannot be replaced; or not now.
        """
        got = f"a replacement of {role} by {' '.join(command)}"
        for wrong, needed, do in self._refusals(role, command, stopping=stopping):
            if wrong:
                raise StateError("this service cannot be replaced while the run goes on", got=got, needed=needed, do=do)
        self.newest = Swap(role=role, command=tuple(command), stage=Stage.TESTING)
        return self.newest

    def _refusals(self, role: Role, command: Sequence[str], *, stopping: bool) -> Sequence[tuple[bool, str, str]]:
        around, newest = self._surroundings, self.newest
        again = "Name it in the configuration (services) and go on from a checkpoint: rollplex up CONFIG --resume."
        return (
            (role not in {Role.ROLLOUT, Role.PREFIX, Role.TRAINER}, "rollout, prefix or trainer", ""),
            (not command, "a program", ""),
            (not around.single, "one device: several processes of a role would have to be replaced at once", again),
            (around.external_workers, "workers that this coordinator starts", "Replace the container, and go on."),
            (
                around.remote,
                "a control API on loopback: what it is told to start runs as this user",
                "Set http.host to 127.0.0.1 and use an SSH tunnel.",
            ),
            (around.gpu, "host memory: the conformance test has no GPU of its own", again),
            (role is Role.ROLLOUT and around.pools, "an engine without a pool for the whole run", again),
            (newest is not None and newest.under_way, "no other replacement under way", "Wait for it."),
            (stopping, "a run that goes on", ""),
        )

    def passed(self) -> Swap:
        """The newcomer conforms: it takes the place at the next border."""
        return self._become(Stage.TESTING, stage=Stage.PASSED)

    def refused(self, case: str, got: str, needed: str) -> Swap:
        """It may not take the place, or could not; the old program has it."""
        swap = self.newest
        assert swap is not None, "refused without a replacement"
        assert swap.under_way, f"refused twice: {swap}"
        self.newest = replace(swap, stage=Stage.REFUSED, case=case, got=got, needed=needed)
        return self.newest

    def swapped(self, step: int) -> Swap:
        """It has the place, from iteration `step` on."""
        return self._become(Stage.PASSED, stage=Stage.SWAPPED, step=step)

    def undone(self, got: str, needed: str) -> Swap:
        """It had the place, and ended before its first iteration; the old program has it again."""
        return self._become(Stage.SWAPPED, stage=Stage.REFUSED, case=TAKEOVER, got=got, needed=needed, step=None)

    @property
    def due(self) -> Swap | None:
        """What is to happen at a border."""
        return self.newest if self.newest is not None and self.newest.stage is Stage.PASSED else None

    def _become(self, before: Stage, **changes: object) -> Swap:
        swap = self.newest
        assert swap is not None, f"{changes} without a replacement"
        assert swap.stage is before, f"{changes} after {swap}"
        self.newest = replace(swap, **changes)
        return self.newest
