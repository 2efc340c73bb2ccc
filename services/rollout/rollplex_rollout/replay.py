"""An engine that samples nothing: it gives the responses again that another run wrote down.

Owns the reading of them, and when a group is announced. For comparisons of gradients: whatever the schedule or the
hardware, every run learns from the same tokens. Their log-probabilities are those of the run that sampled them, and so
is their weights version; that is why it is not on policy, and why the coordinator asks for it by name.

    completions.jsonl (run.log_tokens)  ─►  step, group, sample: ids, logprobs, stopped  ─►  groups, shortest first
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from rollplex.errors import EngineError
from rollplex.memory.segment import Mapping
from rollplex.protocol.common import PromptSlot
from rollplex_rollout.engine import Announce, FinishedGroup, Setup, Unit, UnitReport, nobody

TRAIN: Final = "train"
"""The source of training responses; those of evaluations have its name."""
DO: Final = "Record with run.log_completions at least data.prompts_per_iteration, and run.log_tokens: true."


class Recorded(Struct, frozen=True, kw_only=True):
    """One response of a line; what else the line has is not needed."""

    source: str
    step: int
    row: int
    group: int
    sample: int
    stopped: bool
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


class ReplayEngine:
    """Announces recorded responses (`rollplex_rollout.engine.Engine`); reads no weights and holds no K/V."""

    def __init__(self, setup: Setup) -> None:
        """Read the file.

        Raises:
            EngineError: it cannot be read, or has no responses of training with tokens.
        """
        self._setup = setup
        self._seconds = setup.engine.replay_s
        self._file = setup.engine.replay
        self._groups = read_recorded(Path(self._file))

    @property
    def on_policy(self) -> bool:
        return False

    @property
    def actor(self) -> Mapping:
        return self._setup.actor

    def digest(self) -> str:
        return self._setup.digest()

    def check_mapped(self) -> None:
        """Nothing to look at: it reads no weights."""

    def kv_bytes(self, unit: Unit) -> int:
        del unit
        return 0

    def generate(self, unit: Unit, announce: Announce, prefilled: Callable[[], None] = nobody) -> UnitReport:
        unit.check()
        start_s = time.monotonic()
        prefilled()
        groups = sorted((self._group(unit, slot) for slot in unit.prompts), key=lambda group: max(group.lengths))
        for number, group in enumerate(groups, start=1):
            end_s = start_s + self._seconds * number / len(groups)
            time.sleep(max(0.0, end_s - time.monotonic()))
            announce(group)
        return UnitReport(
            start_s=start_s,
            prefill_end_s=start_s,
            end_s=time.monotonic(),
            decode_steps=max(max(group.lengths) for group in groups) - 1,
            vision_prompts=0,
            kv_bytes=0,
        )

    def drop_caches(self) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        self._groups.clear()

    def _group(self, unit: Unit, slot: PromptSlot) -> FinishedGroup:
        """The recorded responses of a prompt, in order of their samples."""
        where = f"{self._file}, step {unit.step}, group {slot.group}"
        found = self._groups.get((unit.step, slot.group), [])
        size = unit.sampling.group_size
        if [one.sample for one in found] != list(range(size)):
            raise EngineError(
                "A group was not recorded whole",
                got=f"{len(found)} responses",
                needed=f"{size}, as rollout.group_size says",
                do=DO,
                where=where,
            )
        other = next((one.row for one in found if one.row != slot.row), None)
        if other is not None:
            raise EngineError(
                "The recorded responses answer another prompt",
                got=f"row {other}",
                needed=f"row {slot.row}",
                do="Replay with the data, seed and batching that were recorded.",
                where=where,
            )
        lengths = tuple(len(one.ids) for one in found)
        at = unit.prompts.index(slot) * size
        limits = tuple(int(limit) for limit in unit.limits()[at : at + size])
        forced = bool(unit.sampling.forced_lengths)
        fits = lengths == limits if forced else max(lengths) <= max(limits)
        if min(lengths) < 1 or not fits:
            raise EngineError(
                "A recorded response has a length that this run does not have",
                got=f"{min(lengths)} to {max(lengths)} tokens",
                needed=f"{list(limits)}, as rollout.forced_lengths says"
                if forced
                else f"1 to rollout.max_new_tokens = {unit.sampling.max_new_tokens}",
                do="Replay with the lengths that were recorded: memory is planned for those of this configuration.",
                where=where,
            )
        return FinishedGroup(
            group=slot.group,
            lengths=lengths,
            tokens=np.asarray([token for one in found for token in one.ids], dtype=np.int32),
            logprobs=np.asarray([value for one in found for value in one.logprobs], dtype=np.float64),
            stopped=tuple(one.stopped for one in found),
        )


def read_recorded(file: Path) -> dict[tuple[int, int], list[Recorded]]:
    """Responses of training by step and group, in order of their samples.

    Raises:
        EngineError: the file cannot be read, a line is not such a response, or none has tokens.
    """
    groups: dict[tuple[int, int], list[Recorded]] = defaultdict(list)
    for one in _lines(file):
        if one.source == TRAIN and one.ids:
            groups[one.step, one.group].append(one)
    if not groups:
        raise EngineError(
            "There are no responses to replay", needed="responses of training with their tokens", do=DO, where=str(file)
        )
    return {place: sorted(found, key=lambda one: one.sample) for place, found in groups.items()}


def _lines(file: Path) -> Iterable[Recorded]:
    decoder = msgspec.json.Decoder(Recorded)
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                one = decoder.decode(line)
                if len(one.ids) != len(one.logprobs):
                    raise EngineError(
                        "A recorded response is not whole",
                        got=f"{len(one.ids)} tokens, {len(one.logprobs)} log-probabilities",
                        where=f"{file}:{number}",
                    )
                yield one
    except msgspec.MsgspecError as error:
        raise EngineError("This is not a file of responses", got=str(error), do=DO, where=str(file)) from error
    except OSError as error:
        raise EngineError("Recorded responses cannot be read", got=str(error), where=str(file)) from error
