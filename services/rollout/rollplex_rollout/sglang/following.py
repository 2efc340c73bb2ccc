"""The ranks of an engine that follow rank 0: they sample nothing by themselves, and say what it says.

Owns: what becomes of what rank 0 tells (`ranks`). This rank's scheduler process is led by that of rank 0; here it is
only looked after: mapped weights, their header, whether it lives.

    waits for: rank 0's next round.   unblocked by: it, the death of a process, a deadline
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rollplex.errors import EngineError, ProtocolError
from rollplex.memory.segment import Mapping
from rollplex_rollout.engine import Announce, Setup, Unit, UnitReport, nobody
from rollplex_rollout.sglang import ranks
from rollplex_rollout.sglang.rank import Rank, Remote


class Watched(Protocol):
    """What a rank needs of `rollplex_rollout.sglang.runtime.SglangRuntime` to look after its process."""

    def require_alive(self) -> None: ...

    def close(self) -> None: ...


class FollowingEngine(Rank):
    """`rollplex_rollout.engine.Engine`: the same groups in the same order as rank 0's, in the same bits."""

    def __init__(self, setup: Setup, runtime: Watched, remote: Remote, actor: Mapping, line: ranks.Rounds) -> None:
        """Of an engine that is up; returns when rank 0 has brought it to rest.

        Args:
            actor: this rank's weights segment as it can be read through `remote`.
        """
        super().__init__(setup, remote, actor)
        self._runtime = runtime
        self._line = line
        ranks.expect(self._line.hear(late=True), ranks.Up)

    def generate(self, unit: Unit, announce: Announce, prefilled: Callable[[], None] = nobody) -> UnitReport:
        """Say what rank 0 says of a unit; after an error the engine is of no use any more."""
        with self._line.failing():
            unit.check()
            self._runtime.require_alive()
            start_s, kv_bytes = time.monotonic(), self.kv_bytes(unit)
            self._begin(unit)
            self.lend_inputs(unit)
            while True:
                for said in self._line.hear():
                    match said:
                        case ranks.Prefilled():
                            prefilled()
                        case ranks.Sampled():
                            announce(ranks.finished(said))
                        case ranks.Over():
                            return ranks.report(said, start_s, kv_bytes)
                        case _:
                            raise ProtocolError("Rank 0 of SGLang's engine is at another instruction", got=f"{said}")

    def drop_caches(self) -> None:
        """Rank 0 has it done on all ranks. An engine with weights of its own copies the new ones here."""
        with self._line.failing():
            ranks.expect(self._line.hear(late=True), ranks.Dropped)
            self.renew()

    def close(self) -> None:
        super().close()
        self._runtime.close()

    def _begin(self, unit: Unit) -> None:
        said = self._line.hear(late=True)
        ranks.expect(said, ranks.Begun)
        if said[0] != ranks.begun(unit):
            raise EngineError(
                "The ranks of SGLang's engine have different units", got=f"{said[0]}", needed=f"{ranks.begun(unit)}"
            )
