"""The gate: when the weights may change. A pure state machine, events in, instructions out.

    OPEN ──close──► PREPARING ──vote, all drained──► BEGINNING ──begun_durable──► APPLYING ──applied──► COMMITTING
     ▲                  │ vote failed                                                                       │
     │                  ▼                                                                  committed_durable
     │              SKIPPING ──skipped, all drained──┐                                                      │
     └─────────────────── all caches dropped ─── DROPPING ◄─────────────────────────────────────────────────┘

    OPEN        readers may read `version`; between begin_step and close a step runs on it
    PREPARING   the trainer sums gradients and votes, readers drain; the weights are still whole
    BEGINNING   nobody reads; BEGIN is on its way to the disk
    APPLYING    the trainer writes the weights: whoever finds them now finds them poisoned
    COMMITTING  the weights are whole again, at version + 1; COMMIT is on its way to the disk
    SKIPPING    the vote failed or the step was abandoned: the trainer drops gradients, readers still drain
    DROPPING    readers learn the version, drop what depended on another, and say so
    FAILED      too many failed votes in a row; the weights are whole, at `version`

I1: a group whose tokens were not all sampled from `version` is refused. I2: the version moves by one, in `applied`
alone. I4: BEGIN is not asked for before every reader has drained, and no reader is told of a version before COMMIT is
on disk. I7: `close` is refused until each group of the step was sampled and trained exactly once and each prefix unit
ran backward exactly once (`tally`).

Every method takes one event; it checks first and changes afterwards, so an event that is refused (StateError, with the
recent story) leaves the gate as it was. Knows nothing of sockets, clocks, tensors or the journal's file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from rollplex.errors import EngineError, StateError, UpdateError
from rollplex_coordinator.decisions.gate_steps import (
    Apply,
    DrainReader,
    GateStep,
    JournalBegin,
    JournalCommit,
    Opened,
    Prepare,
    Skip,
    TellReader,
)
from rollplex_coordinator.decisions.tally import Tally

STORY_EVENTS = 20
"""How many past events an error tells."""


class State(StrEnum):
    """Where the gate stands; see the module's drawing."""

    OPEN = "open"
    PREPARING = "preparing"
    BEGINNING = "beginning"
    APPLYING = "applying"
    COMMITTING = "committing"
    SKIPPING = "skipping"
    DROPPING = "dropping"
    FAILED = "failed"


class Gate:
    """The gate of one copy of the weights.

    Args:
        version: the committed version to start from.
        step: the number of the first step.
        max_failed_votes: so many in a row end the run.
        failed_votes: so many in a row there have been just before.
    """

    def __init__(self, *, version: int = 0, step: int = 0, max_failed_votes: int = 3, failed_votes: int = 0) -> None:
        self._max_failed_votes = max_failed_votes
        self._state = State.OPEN
        self._version = version
        self._step = step
        self._readers: set[str] = set()
        self._failed_votes = failed_votes
        self._skipped_steps = 0
        self._events = 0
        self._story: deque[str] = deque(maxlen=STORY_EVENTS)
        self._forget_step()

    def _forget_step(self) -> None:
        self._tally: Tally | None = None
        self._voted: bool | None = None
        self._gradients_dropped = False
        self._updated = False
        self._drained: set[str] = set()
        self._dropped: set[str] = set()

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._state

    @property
    def version(self) -> int:
        """The version that readers may read, or will when the gate opens."""
        return self._version

    @property
    def step(self) -> int:
        """The step that runs or comes next."""
        return self._step

    @property
    def running(self) -> bool:
        """Whether a step is under way."""
        return self._tally is not None

    @property
    def failed_votes(self) -> int:
        """Failed votes in a row, up to now."""
        return self._failed_votes

    @property
    def skipped_steps(self) -> int:
        """Steps whose vote failed."""
        return self._skipped_steps

    @property
    def readers(self) -> frozenset[str]:
        return frozenset(self._readers)

    @property
    def may_read(self) -> bool:
        """Whether a reader may be given work that reads the weights."""
        return self._state is State.OPEN

    @property
    def awaited(self) -> tuple[str, ...]:
        """What the gate waits for, and from whom; empty while it is open."""
        undrained = tuple(f"{reader}: drained" for reader in sorted(self._readers - self._drained))
        vote = () if self._voted is not None else ("trainer: vote",)
        skip = () if self._gradients_dropped else ("trainer: gradients dropped",)
        return {
            State.OPEN: (),
            State.PREPARING: (*vote, *undrained),
            State.BEGINNING: ("journal: BEGIN on disk",),
            State.APPLYING: ("trainer: update applied",),
            State.COMMITTING: ("journal: COMMIT on disk",),
            State.SKIPPING: (*skip, *undrained),
            State.DROPPING: tuple(f"{reader}: caches dropped" for reader in sorted(self._readers - self._dropped)),
            State.FAILED: (),
        }[self._state]

    @property
    def settled(self) -> bool:
        """Whether the weights are whole: no update is between BEGIN and COMMIT, and the gate has not failed."""
        return self._state in {State.OPEN, State.PREPARING, State.SKIPPING, State.DROPPING}

    # --- readers come and go --------------------------------------------------------------------------------------

    def register_reader(self, reader: str, *, on_policy: bool, replayed: bool = False) -> tuple[GateStep, ...]:
        """A process that reads the weights is loaded.

        Args:
            on_policy: whether the tokens it samples come from the mapped weights.
            replayed: the configuration asks for recorded responses, to compare gradients: then it need not be.

        Raises:
            EngineError: it is not on policy.
            StateError: it is registered, or the gate is not open.
        """
        event = f"register_reader {reader}"
        self._expect(self._state is State.OPEN, event, "an open gate")
        self._expect(reader not in self._readers, event, "a reader that is not registered")
        if not (on_policy or replayed):
            raise EngineError(
                "This rollout does not sample from the mapped weights",
                got="on_policy: false",
                needed="on_policy: true, because every trained token must come from the step's version",
                do="Use an engine that maps the actor-weights segment",
                where=reader,
            )
        self._note(event)
        self._readers.add(reader)
        return ()

    def remove_reader(self, reader: str) -> tuple[GateStep, ...]:
        """A reader's process has ended: it reads nothing any more.

        Raises:
            StateError: it is not registered.
        """
        event = f"remove_reader {reader}"
        self._expect(reader in self._readers, event, self._one_of_readers())
        self._note(event)
        for names in (self._readers, self._drained, self._dropped):
            names.discard(reader)
        return self._advance()

    # --- one step -------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, num_groups: int, prefix_units: Sequence[Sequence[int]]) -> tuple[GateStep, ...]:
        """A step starts on the present version.

        Args:
            prefix_units: the groups of each prefix unit; each group of the step in exactly one.

        Raises:
            StateError: not the next step, one is running, the gate is not open, or the units do not cover the groups.
        """
        event = f"begin_step {step}: {num_groups} groups in {len(prefix_units)} prefix units"
        self._expect(self._state is State.OPEN and not self.running, event, "an open gate and no step under way")
        self._expect(step == self._step, event, f"step {self._step}")
        tally = Tally(num_groups, prefix_units)
        self._expect(tally.covered, event, "each group in exactly one unit")
        self._note(event)
        self._tally = tally
        return ()

    def group_sampled(self, group: int, version_start: int, version_end: int) -> tuple[GateStep, ...]:
        """All responses of a group are there, with the versions that the rollout read before the first and after the
        last token (I1).

        Raises:
            StateError: another version, not a group of the step, sampled before, or no step under way.
        """
        event = f"group_sampled {group} from version {version_start} to {version_end}"
        tally = self._tally_for(event)
        self._refuse(tally.why_not_sampled(group), event)
        self._expect(version_start == version_end == self._version, event, f"tokens of version {self._version} alone")
        self._note(event)
        tally.sampled.add(group)
        return ()

    def group_trained(self, group: int) -> tuple[GateStep, ...]:
        """The trainer has a group's suffix gradients in its arena (I7).

        Raises:
            StateError: the group was not sampled, or was trained before, or no step is under way.
        """
        event = f"group_trained {group}"
        tally = self._tally_for(event)
        self._refuse(tally.why_not_trained(group), event)
        self._note(event)
        tally.trained.add(group)
        return ()

    def prefix_backward_done(self, unit: int) -> tuple[GateStep, ...]:
        """A prefix unit's gradients are in the prefix service's arena (I7).

        Raises:
            StateError: not a unit of the step, done before, one of its groups is not trained, or no step is under way.
        """
        event = f"prefix_backward_done {unit}"
        tally = self._tally_for(event)
        self._refuse(tally.why_not_backward(unit), event)
        self._note(event)
        tally.backward.add(unit)
        return ()

    def close(self) -> tuple[GateStep, ...]:
        """The step's work is done: prepare the update, and drain the readers.

        Raises:
            StateError: a group or prefix unit is missing, or no step is under way.
        """
        self._refuse(self._tally_for("close").why_not_closed(), "close")
        cause = self._note("close")
        self._state = State.PREPARING
        return (Prepare(cause=cause, step=self._step, version=self._version), *self._drain_all(cause))

    def abandon(self) -> tuple[GateStep, ...]:
        """The running step is given up: its gradients are dropped; the same step can begin again.

        Raises:
            StateError: no step is under way, or its update is being prepared.
        """
        self._tally_for("abandon")
        cause = self._note("abandon")
        self._state = State.SKIPPING
        return (Skip(cause=cause, step=self._step), *self._drain_all(cause))

    def lost(self) -> tuple[GateStep, ...]:
        """The trainer and all readers have ended; new ones come, over the same weights, and register.

        The step that was under way can begin again, as if it had not begun. If its outcome is settled already (COMMIT
        is on disk, or the gradients of a failed vote are dropped) it is over instead, and the gate opens.

        Raises:
            StateError: the weights are between BEGIN and COMMIT, or the gate has failed.
        """
        self._expect(self.settled, "lost", "weights that are whole")
        cause = self._note("lost")
        self._readers.clear()
        if self._state is State.DROPPING:
            return self._open(cause)
        if self._voted is False:  # it will be voted on again
            self._failed_votes -= 1
            self._skipped_steps -= 1
        self._state = State.OPEN
        self._forget_step()
        return ()

    # --- the update -----------------------------------------------------------------------------------------------

    def voted(self, *, finite: bool) -> tuple[GateStep, ...]:
        """The trainer's vote on the summed gradients.

        Raises:
            StateError: no vote is awaited.
            UpdateError: this was the last of too many failed votes in a row; the gate has then failed for good.
        """
        event = f"voted {'finite' if finite else 'not finite'}"
        self._expect(self._state is State.PREPARING and self._voted is None, event, "a vote that is awaited")
        cause = self._note(event)
        self._voted = finite
        if finite:
            self._failed_votes = 0
            return self._advance()
        self._failed_votes += 1
        self._skipped_steps += 1
        if self._failed_votes >= self._max_failed_votes:
            self._state = State.FAILED
            raise UpdateError(
                "The gradients are not finite again and again",
                got=f"{self._failed_votes} failed votes in a row",
                needed=f"fewer than {self._max_failed_votes}",
                do="Lower the learning rate, clip gradients, or look at the rewards and lengths of these steps",
                where=f"step {self._step}, weights unchanged at version {self._version}",
            )
        self._state = State.SKIPPING
        return (Skip(cause=cause, step=self._step), *self._advance())

    def reader_drained(self, reader: str, version: int) -> tuple[GateStep, ...]:
        """A reader reads no more.

        Raises:
            StateError: not awaited from it, or it was at another version.
        """
        event = f"reader_drained {reader} at version {version}"
        self._expect(self._state in {State.PREPARING, State.SKIPPING}, event, "a drain that is awaited")
        self._expect(reader in self._readers, event, self._one_of_readers())
        self._expect(reader not in self._drained, event, "each reader once")
        self._expect(version == self._version, event, f"version {self._version}")
        self._note(event)
        self._drained.add(reader)
        return self._advance()

    def begun_durable(self) -> tuple[GateStep, ...]:
        """BEGIN is on disk.

        Raises:
            StateError: it was not asked for.
        """
        self._expect(self._state is State.BEGINNING, "begun_durable", "a BEGIN that is awaited")
        cause = self._note("begun_durable")
        self._state = State.APPLYING
        return (Apply(cause=cause, step=self._step, version=self._version),)

    def applied(self, version: int, digest: str) -> tuple[GateStep, ...]:
        """The trainer has stepped and published `version`.

        Raises:
            StateError: not awaited, not the next version, or without digest.
        """
        event = f"applied version {version} with digest {digest}"
        self._expect(self._state is State.APPLYING, event, "an update that is awaited")
        self._expect(version == self._version + 1, event, f"version {self._version + 1}")
        self._expect(bool(digest), event, "a digest")
        cause = self._note(event)
        self._state = State.COMMITTING
        self._version = version
        self._updated = True
        return (JournalCommit(cause=cause, step=self._step, version=version, digest=digest),)

    def committed_durable(self) -> tuple[GateStep, ...]:
        """COMMIT is on disk.

        Raises:
            StateError: it was not asked for.
        """
        self._expect(self._state is State.COMMITTING, "committed_durable", "a COMMIT that is awaited")
        cause = self._note("committed_durable")
        return self._tell_all(cause)

    def skipped(self) -> tuple[GateStep, ...]:
        """The trainer has dropped the step's gradients.

        Raises:
            StateError: it was not asked for.
        """
        awaited = self._state is State.SKIPPING and not self._gradients_dropped
        self._expect(awaited, "skipped", "a skip that is awaited")
        self._note("skipped")
        self._gradients_dropped = True
        return self._advance()

    def caches_dropped(self, reader: str, version: int) -> tuple[GateStep, ...]:
        """A reader has dropped what depended on other versions, and its segment's header shows `version`.

        Raises:
            StateError: not awaited from it, or another version.
        """
        event = f"caches_dropped {reader} at version {version}"
        self._expect(self._state is State.DROPPING, event, "dropped caches that are awaited")
        self._expect(reader in self._readers, event, self._one_of_readers())
        self._expect(reader not in self._dropped, event, "each reader once")
        self._expect(version == self._version, event, f"version {self._version}")
        self._note(event)
        self._dropped.add(reader)
        return self._advance()

    # --- rules ----------------------------------------------------------------------------------------------------

    def _advance(self) -> tuple[GateStep, ...]:
        """What follows once the last answer of several is there."""
        cause = self._events
        drained = self._drained == self._readers
        if self._state is State.PREPARING and self._voted and drained:
            self._state = State.BEGINNING
            return (JournalBegin(cause=cause, step=self._step, version=self._version),)
        if self._state is State.SKIPPING and self._gradients_dropped and drained:
            return self._tell_all(cause)
        if self._state is State.DROPPING and self._dropped == self._readers:
            return self._open(cause)
        return ()

    def _drain_all(self, cause: int) -> tuple[GateStep, ...]:
        return tuple(DrainReader(cause=cause, reader=name, version=self._version) for name in sorted(self._readers))

    def _tell_all(self, cause: int) -> tuple[GateStep, ...]:
        self._state = State.DROPPING
        told = tuple(TellReader(cause=cause, reader=name, version=self._version) for name in sorted(self._readers))
        return told or self._open(cause)

    def _open(self, cause: int) -> tuple[GateStep, ...]:
        opened = Opened(cause=cause, step=self._step, version=self._version, updated=self._updated)
        abandoned = self._voted is None
        self._state = State.OPEN
        self._step += 0 if abandoned else 1
        self._forget_step()
        return (opened,)

    def _note(self, event: str) -> int:
        self._events += 1
        self._story.append(f"#{self._events} {self._state}: {event}")
        return self._events

    def _one_of_readers(self) -> str:
        return f"one of the readers {sorted(self._readers)}"

    def _tally_for(self, event: str) -> Tally:
        tally = self._tally
        if self._state is not State.OPEN or tally is None:
            raise self._refusal(event, "a step under way at an open gate")
        return tally

    def _refuse(self, needed: str, event: str) -> None:
        if needed:
            raise self._refusal(event, needed)

    def _expect(self, allowed: bool, event: str, needed: str) -> None:
        if not allowed:
            raise self._refusal(event, needed)

    def _refusal(self, event: str, needed: str) -> StateError:
        return StateError(
            "The gate does not allow this event",
            got=event,
            needed=needed,
            do="Events before it: " + ("; ".join(self._story) or "none"),
            where=f"gate {self._state}, step {self._step}, version {self._version}",
        )
