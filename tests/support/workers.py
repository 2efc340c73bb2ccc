"""Workers without processes: a hub that notes what is sent and lets answers arrive in an order that the test chooses.

Every message passes its channel's codec. Leases and segments that a message names must be there when it is sent and
still be there when its answer arrives.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rollplex.data.inputs import ALIGN_BYTES
from rollplex.protocol.codec import CHANNELS
from rollplex.protocol.common import (
    CachesDropped,
    Committed,
    Device,
    DigestReply,
    DigestRequest,
    Drain,
    Drained,
    Held,
    LeaseRef,
    Logprobs,
    MediaSlot,
    PromptSlot,
    Responses,
    Role,
)
from rollplex.protocol.inputs import (
    InputsSized,
    InputsWritten,
    PrepareInputs,
    RowShown,
    RowsShown,
    ShowRows,
    WriteInputs,
)
from rollplex.protocol.prefix import (
    PrefixBackward,
    PrefixBackwardDone,
    PrefixForward,
    PrefixReady,
    ScoreSuffix,
    SuffixScored,
)
from rollplex.protocol.reward import GroupRewarded, RewardFailed, RewardGroup, RewardProblem
from rollplex.protocol.rollout import GenerateUnit, GroupFinished, Prefilled, UnitGenerated
from rollplex.protocol.trainer import (
    ApplyUpdate,
    CheckpointSaved,
    GradientsKept,
    KeepGradients,
    PrepareUpdate,
    Publish,
    Published,
    SaveCheckpoint,
    SkipUpdate,
    SuffixTrained,
    TrainSuffix,
    TrainWhole,
    UpdateApplied,
    UpdateSkipped,
    UpdateVote,
    WholeTrained,
)
from rollplex_coordinator.decisions.fleet import SINGLE, Fleet
from rollplex_coordinator.processes.hub import Arrived, Event, Joined, Peer

ROW_WIDTH = 1176
STOP_ID = 7
DIGEST = "d" * 64


def doubles(*values: float) -> bytes:
    """float64, little-endian."""
    return struct.pack(f"<{len(values)}d", *values)


def prompts_of(rows: tuple[int, ...]) -> tuple[tuple[PromptSlot, ...], int]:
    """The prompts of some rows, functions of their numbers: text, one image, or two; and the segment's size."""
    slots = []
    for group, row in enumerate(rows):
        grids = (((1, 4, 4),), (), ((1, 2, 4), (1, 4, 2)))[row % 3]
        tokens = 3 + row % 5 + sum(2 + t * h * w // 4 for t, h, w in grids)
        media = tuple(MediaSlot(offset=0, frames=t, height=h, width=w) for t, h, w in grids)
        slot = PromptSlot(
            group=group,
            row=row,
            tokens=tokens,
            ids_offset=0,
            positions_offset=0,
            next_position=tokens,
            media=media,
        )
        slots.append(slot)
    return lay_out(slots)


def lay_out(slots: Sequence[PromptSlot]) -> tuple[tuple[PromptSlot, ...], int]:
    """Places for prompts in an inputs segment, as `rollplex.data.inputs` lays them out, and its size in bytes."""
    at = 0

    def place(size_bytes: int) -> int:
        nonlocal at
        start = at
        at = -(-(at + size_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        return start

    placed = []
    for slot in slots:
        ids, positions = place(8 * slot.tokens), place(24 * slot.tokens)
        media = tuple(replace(m, offset=place(4 * ROW_WIDTH * m.rows)) for m in slot.media)
        placed.append(replace(slot, ids_offset=ids, positions_offset=positions, media=media))
    return tuple(placed), at


class Workers:
    """What each instruction is answered; ranks of a team are answered alike. `answers[type]` may be replaced by a test.

    Args:
        rng: draws lengths and rewards.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._lengths: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
        """What was drawn for a group, by step, unit, group and row."""
        self._clock = 0.0
        self.version = 0
        """Of the weights, as the trainer publishes it."""
        self.answers: dict[type, Callable[[Any], list[Any]]] = {
            PrepareInputs: self.prepare_inputs,
            WriteInputs: lambda m: [InputsWritten(cause=m.cause, step=m.step)],
            ShowRows: lambda m: [
                RowsShown(
                    cause=m.cause, step=m.step, rows=tuple(RowShown(row=row, prompt=f"row {row}?") for row in m.rows)
                )
            ],
            GenerateUnit: self.generate,
            PrefixForward: self.forward,
            ScoreSuffix: self.score,
            PrefixBackward: lambda m: [
                PrefixBackwardDone(
                    cause=m.cause,
                    step=m.step,
                    unit=m.unit,
                    start_s=self.now(),
                    end_s=self.now(),
                    held=()
                    if m.workspace is None
                    else (Held(lease=m.workspace.lease, size_bytes=m.workspace.size_bytes),),
                )
            ],
            TrainSuffix: self.train,
            TrainWhole: self.train_whole,
            RewardGroup: lambda m: [self.rewarded(m)],
            PrepareUpdate: lambda m: [
                UpdateVote(cause=m.cause, step=m.step, finite=True, start_s=0.0, end_s=0.5, metrics={"loss": 0.5})
            ],
            KeepGradients: lambda m: [GradientsKept(cause=m.cause, step=m.step, size_bytes=8)],
            ApplyUpdate: self.apply,
            Publish: lambda m: [
                Published(
                    cause=m.cause,
                    version=m.version,
                    digest=DIGEST,
                    refreshed_bytes=30,
                    rebuilt_bytes=4,
                    start_s=self.now(),
                    end_s=self.now(),
                )
            ],
            SkipUpdate: lambda m: [UpdateSkipped(cause=m.cause, step=m.step)],
            Drain: lambda m: [Drained(cause=m.cause, version=m.version)],
            Committed: lambda m: [CachesDropped(cause=m.cause, version=self.version)],
            DigestRequest: lambda m: [DigestReply(cause=m.cause, version=self.version, digest=DIGEST)],
            SaveCheckpoint: lambda m: [
                CheckpointSaved(cause=m.cause, step=m.step, version=m.version, folder=m.folder, size_bytes=10)
            ],
        }

    def now(self) -> float:
        """A clock that moves with every look at it."""
        self._clock += 1.0
        return self._clock

    def prepare_inputs(self, m: PrepareInputs) -> list[Any]:
        prompts, size_bytes = prompts_of(m.rows)
        return [InputsSized(cause=m.cause, step=m.step, size_bytes=size_bytes, prompts=prompts)]

    def generate(self, m: GenerateUnit) -> list[Any]:
        """Groups in any order, then the unit."""
        start_s = self.now()
        groups: list[Any] = [self.finished(m, slot) for slot in m.prompts]
        self._rng.shuffle(groups)
        end = UnitGenerated(
            cause=m.cause,
            step=m.step,
            unit=m.unit,
            start_s=start_s,
            prefill_end_s=self.now(),
            end_s=self.now(),
            decode_steps=1,
            vision_prompts=sum(1 for slot in m.prompts if slot.media),
            held=(Held(lease=m.kv.lease, size_bytes=m.kv.size_bytes),),
        )
        return [Prefilled(cause=m.cause, step=m.step, unit=m.unit, end_s=end.prefill_end_s), *groups, end]

    def finished(self, m: GenerateUnit, slot: PromptSlot) -> GroupFinished:
        size = m.sampling.group_size
        forced = m.sampling.forced_lengths
        drawn = m.step, m.unit, slot.group, slot.row
        if drawn not in self._lengths:
            self._lengths[drawn] = tuple(
                forced[(slot.group * size + s) % len(forced)]
                if forced
                else self._rng.randint(1, m.sampling.max_new_tokens)
                for s in range(size)
            )
        lengths = self._lengths[drawn]
        total = sum(lengths)
        return GroupFinished(
            cause=m.cause,
            step=m.step,
            version_start=m.version,
            version_end=m.version,
            responses=Responses(group=slot.group, lengths=lengths, tokens=struct.pack("<i", STOP_ID) * total),
            logprobs=Logprobs(group=slot.group, values=doubles(-1.0 - slot.group) * total),
            stopped=tuple(length % 2 == 0 for length in lengths),
            end_s=self.now(),
        )

    def forward(self, m: PrefixForward) -> list[Any]:
        return [
            PrefixReady(
                cause=m.cause,
                step=m.step,
                unit=m.unit,
                which=m.which,
                start_s=self.now(),
                end_s=self.now(),
                vision_prompts=sum(1 for slot in m.prompts if slot.media) * m.copies,
                held=() if m.lease is None else (Held(lease=m.lease.lease, size_bytes=m.lease.size_bytes),),
            )
        ]

    def score(self, m: ScoreSuffix) -> list[Any]:
        return [
            SuffixScored(
                cause=m.cause,
                step=m.step,
                suffix_unit=m.suffix_unit,
                logprobs=tuple(
                    Logprobs(group=r.group, values=doubles(-2.0 - r.group) * sum(r.lengths)) for r in m.responses
                ),
                start_s=self.now(),
                end_s=self.now(),
                held=(Held(lease=m.workspace.lease, size_bytes=m.workspace.size_bytes),),
            )
        ]

    def train(self, m: TrainSuffix) -> list[Any]:
        held = tuple(Held(lease=ref.lease, size_bytes=ref.size_bytes) for ref in named(m, LeaseRef))
        return [
            SuffixTrained(
                cause=m.cause,
                step=m.step,
                suffix_unit=m.suffix_unit,
                start_s=self.now(),
                end_s=self.now(),
                held=held,
                logprobs=trained(m.responses) if m.return_logprobs else (),
            )
        ]

    def train_whole(self, m: TrainWhole) -> list[Any]:
        held = tuple(Held(lease=ref.lease, size_bytes=ref.size_bytes) for ref in named(m, LeaseRef))
        answer = WholeTrained(
            cause=m.cause,
            step=m.step,
            start_s=self.now(),
            end_s=self.now(),
            held=held,
            logprobs=trained(m.responses),
        )
        return [answer]

    def rewarded(self, m: RewardGroup) -> GroupRewarded:
        rewards = [self._rng.randint(0, 4) / 4 for _ in m.responses.lengths]
        return GroupRewarded(
            cause=m.cause,
            step=m.step,
            group=m.responses.group,
            rewards=doubles(*rewards),
            by_function=(doubles(*rewards),),
            texts=tuple("text" for _ in rewards),
            start_s=self.now(),
            end_s=self.now(),
        )

    def apply(self, m: ApplyUpdate) -> list[Any]:
        self.version = m.version + 1
        return [
            UpdateApplied(
                cause=m.cause,
                step=m.step,
                version=m.version + 1,
                digest=DIGEST,
                start_s=self.now(),
                end_s=self.now(),
            )
        ]


def trained(responses: Sequence[Responses]) -> tuple[Logprobs, ...]:
    """The trainer's log-probabilities: those of `finished`."""
    return tuple(Logprobs(group=r.group, values=doubles(-1.0 - r.group) * sum(r.lengths)) for r in responses)


def reward_failed(m: RewardGroup, problem: RewardProblem = RewardProblem.RAISED) -> RewardFailed:
    """A function's failure as an answer."""
    return RewardFailed(
        cause=m.cause,
        step=m.step,
        group=m.responses.group,
        row=m.row,
        function="moody",
        problem=problem,
        detail="not to my taste",
    )


def named(message: Any, kind: type) -> Iterator[Any]:
    """Every value of a type inside a message."""
    if isinstance(message, kind):
        yield message
    elif isinstance(message, msgspec.Struct):
        for field in message.__struct_fields__:
            yield from named(getattr(message, field), kind)
    elif isinstance(message, tuple):
        for item in message:
            yield from named(item, kind)


class Stuck(Exception):  # noqa: N818 - it names what happened
    """The coordinator would wait until a deadline."""


class FakeHub:
    """In place of `Hub`. One worker per role and device, first in first out each; which of them answers next is drawn.

    Args:
        check: called with a message when it is sent and again when each of its answers arrives.
        story: what is sent is appended, as ("send", role, message).
        fleet: which workers there are.
    """

    def __init__(
        self,
        workers: Workers,
        rng: random.Random,
        check: Callable[[Any], None],
        story: list[tuple[Any, ...]],
        fleet: Fleet = SINGLE,
    ) -> None:
        self.workers = workers
        self._rng = rng
        self._check = check
        self._story = story
        every = [
            Peer(role=role, device=device, incarnation=1, pid=1) for role in Role for device in fleet.devices_of(role)
        ]
        self.peers = {peer.role: peer for peer in reversed(every)}
        """Of each role that on its first device."""
        self.sent: list[tuple[Peer, Any]] = []
        self._queues: dict[Peer, deque[tuple[Any, Any]]] = {peer: deque() for peer in every}
        self._first: list[Event] = [Joined(peer=peer) for peer in every]
        self._silent: set[tuple[Role, type]] = set()
        self.arrived = 0
        """Answers so far."""

    def send(self, peer: Peer, message: Any) -> None:
        codec = CHANNELS[peer.role].to_worker
        message = codec.decode(codec.encode(message))
        self._check(message)
        self._story.append(("send", peer.role, message))
        self.sent.append((peer, message))
        if (peer.role, type(message)) in self._silent:
            return
        self._queues[peer].extend((message, answer) for answer in self.workers.answers[type(message)](message))

    def poll(self, timeout_s: float) -> list[Event]:
        """One event.

        Raises:
            Stuck: nothing is left to happen.
        """
        if self._first:
            return [self._first.pop(0)]
        if self.idle:
            raise Stuck("nothing is left to happen")
        peer = self._rng.choice([peer for peer, queue in self._queues.items() if queue])
        message, answer = self._queues[peer].popleft()
        codec = CHANNELS[peer.role].from_worker
        self._check(message)
        self.arrived += 1
        return [Arrived(peer=peer, message=codec.decode(codec.encode(answer)))]

    @property
    def idle(self) -> bool:
        """Nothing is left to arrive."""
        return not any(self._queues.values())

    def silence(self, role: Role, instruction: type) -> None:
        """This worker never answers instructions of this type."""
        self._silent.add((role, instruction))

    def fence(self, roles: Collection[Role]) -> None:
        """Nothing of these processes is heard any more."""
        for peer in [peer for peer in self._queues if peer.role in roles]:
            del self._queues[peer]

    def come(self, role: Role, device: Device, incarnation: int) -> None:
        """Another process in a place that was fenced joins."""
        peer = Peer(role=role, device=device, incarnation=incarnation, pid=incarnation)
        self._queues[peer] = deque()
        self._first.append(Joined(peer=peer))

    def disconnect(self, peer: Peer) -> None:
        """What it has not answered, it never will."""
        self._queues[peer].clear()
