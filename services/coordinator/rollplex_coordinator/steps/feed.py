"""The input child's client: the inputs segment of each step, made one step ahead; the first one's while models load.

    PrepareInputs ─► InputsSized ─► lease, segment ─► WriteInputs ─► InputsWritten

Owns the inputs segments. Their leases may outlive a step's last phase, since the next step's inputs are made meanwhile;
each is given back when its own step is over. Knows nothing of what the rows mean.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from rollplex.config.checks import TRAIN
from rollplex.config.config import Config
from rollplex.data.order import rows_of_step
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Kind, PromptSlot, Role, SegmentRef
from rollplex.protocol.inputs import DataChecked, InputsSized, InputsWritten, PrepareInputs, WriteInputs
from rollplex_coordinator.memory.leasing import Blocks, Memory, Want
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.processes.link import Link


def training_rows(config: Config, data: DataChecked, step: int) -> tuple[int, ...]:
    """The rows of a step of training, in the order of their groups."""
    prompts, good = config.data.prompts_per_iteration, data.usable(TRAIN)
    return rows_of_step(step, prompts, good, seed=config.run.seed, shuffle=config.data.shuffle)


class StepInputs(Struct, frozen=True, kw_only=True):
    """The prompts of one step, in the order of their groups, and the segment that holds them."""

    key: int
    rows: tuple[int, ...]
    prompts: tuple[PromptSlot, ...]
    block: Blocks

    @property
    def ref(self) -> SegmentRef:
        return self.block.ref


class Feed:
    """Inputs by key; a key is prepared once, and there until it is done with: who begins again takes it again."""

    def __init__(self, link: Link, memory: Memory, unit_s: float) -> None:
        self._link = link
        self._memory = memory
        self._unit_s = unit_s
        self._rows: dict[int, tuple[int, ...]] = {}
        self._sized: dict[int, tuple[tuple[PromptSlot, ...], Blocks]] = {}
        self._written: dict[int, StepInputs] = {}
        link.on(InputsSized, self._on_sized)
        link.on(InputsWritten, self._on_written)

    def prepare(self, key: int, source: str, rows: tuple[int, ...]) -> None:
        """Have the inputs of `key` made; nothing happens if they are under way, or made and not done with."""
        if key not in self._rows:
            self._rows[key] = rows
            self._ask(
                lambda cause: PrepareInputs(cause=cause, step=key, source=source, rows=rows),
                f"prepare {len(rows)} rows",
            )

    def prepare_step(self, step: int, rows: tuple[int, ...]) -> None:
        """Have the inputs of a step of training made, as `prepare`."""
        self.prepare(step, TRAIN, rows)

    def take(self, key: int) -> StepInputs:
        """The inputs of a prepared key; pumps until they are written."""
        self._link.pump(lambda: key in self._written)
        return self._written[key]

    def done(self, inputs: StepInputs) -> None:
        """Nobody reads these inputs any more."""
        del self._rows[inputs.key], self._written[inputs.key]
        self._memory.release(inputs.block)

    def drop_from(self, key: int) -> None:
        """Inputs from this key on are wanted no more, though nobody was done with them: whoever had them made begins
        again, and there is no memory planned for more than it holds at a time. Pumps until those under way are written,
        within the deadlines of what the input child was asked: it still fills their segments.

        Raises:
            WaitError: the input child has not answered in time.
        """
        for late in [prepared for prepared in self._rows if prepared >= key]:
            self.done(self.take(late))

    def _on_sized(self, _peer: Peer, message: InputsSized) -> None:
        want = Want(
            kind=Kind.INPUTS,
            size_bytes=message.size_bytes,
            owner=Role.INPUT,
            last_consumer=Role.PREFIX,
            first=Phase.IDLE,
            last=Phase.DRAIN,
            purpose=f"inputs of step {message.step}",
            segment=True,
            on_host=True,  # the input child fills it, which sees no GPU
        )

        def granted(blocks: tuple[Blocks, ...]) -> None:
            self._sized[message.step] = (message.prompts, blocks[0])
            self._ask(
                lambda cause: WriteInputs(cause=cause, step=message.step, segment=blocks[0].ref),
                f"write the inputs of {len(message.prompts)} prompts",
            )

        self._memory.when_free((want,), granted)

    def _on_written(self, _peer: Peer, message: InputsWritten) -> None:
        prompts, block = self._sized.pop(message.step)
        rows = self._rows[message.step]
        self._written[message.step] = StepInputs(key=message.step, rows=rows, prompts=prompts, block=block)

    def _ask(self, make: Callable[[int], object], what: str) -> None:
        self._link.ask(Role.INPUT, make, what, self._unit_s)
