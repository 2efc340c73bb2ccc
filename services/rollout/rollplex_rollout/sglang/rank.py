"""What every rank of an engine has: its part of the weights, as its own scheduler process has mapped them.

Owns: the questions about weights and sizes that each rank answers for itself. Does not sample.
"""

from __future__ import annotations

from typing import Protocol

from rollplex.errors import EngineError
from rollplex.memory.segment import Mapping
from rollplex_rollout.engine import Setup, Unit
from rollplex_rollout.sglang.arguments import SPARE_TOKENS, pool_bytes


class Remote(Protocol):
    """What a rank needs of `rollplex_rollout.sglang.remote.RemoteWeights`."""

    def digest(self) -> str: ...

    def look(self) -> None: ...

    def copy(self) -> None: ...

    def lend_inputs(self, fd: int, size_bytes: int) -> None: ...

    def close(self) -> None: ...


class Rank:
    """One rank's part in `rollplex_rollout.engine.Engine`.

    Args:
        actor: the weights segment as it can be read through `remote`.
    """

    def __init__(self, setup: Setup, remote: Remote, actor: Mapping) -> None:
        self._setup = setup
        self._remote = remote
        self._actor = actor

    @property
    def on_policy(self) -> bool:
        return True

    @property
    def actor(self) -> Mapping:
        return self._actor

    def digest(self) -> str:
        return self._remote.digest()

    def check_mapped(self) -> None:
        self._remote.look()

    def kv_bytes(self, unit: Unit) -> int:
        """The pool, whatever the unit: SGLang takes all of it at once.

        Raises:
            EngineError: a prompt of the unit does not fit with its response.
        """
        longest = max(slot.tokens for slot in unit.prompts) + unit.longest
        if longest > self.room:
            raise EngineError(
                "SGLang's pool of keys and values does not hold a prompt with its response",
                got=f"{longest} tokens",
                needed=f"at most {self.room}",
                do="Raise rollout.sglang.kv_tokens, or lower rollout.max_new_tokens.",
            )
        return pool_bytes(self._setup)

    @property
    def room(self) -> int:
        """Tokens of the longest request that SGLang takes without shortening it."""
        return min(self._setup.engine.context_tokens, self._setup.engine.kv_tokens - SPARE_TOKENS)

    def lend_inputs(self, unit: Unit) -> None:
        """Let the scheduler process read a unit's pictures, until it rests.

        Raises:
            EngineError: the unit has pictures and no descriptor of its inputs.
        """
        if not any(slot.media for slot in unit.prompts):
            return
        if unit.inputs_fd is None:
            raise EngineError(
                "SGLang's own process cannot read a unit's pictures",
                got="no descriptor of the inputs segment",
                where=f"step {unit.step}",
            )
        self._remote.lend_inputs(unit.inputs_fd, unit.inputs.size_bytes)

    def renew(self) -> None:
        """Copy the weights anew, where the engine has some of its own."""
        if self._setup.engine.own_weights:
            self._remote.copy()

    def close(self) -> None:
        self._actor.close()
        self._remote.close()
