"""A prefix service that counts its part of one parameter's gradient twice.

Used in place of the prefix service (`services.prefix`): what a subtle error in one of its passes would do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollplex.protocol.common import Role
from rollplex.protocol.prefix import PrefixBackward
from rollplex.worker import Segments, run

WRONG = "model.layers.1.mlp.down_proj.weight"
"""As stored; transformers says model.language_model.layers.1.mlp.down_proj.weight."""


def make(segments: Segments) -> Any:
    from rollplex_prefix.service import PrefixService

    class Wrong(PrefixService):
        def handle(self, message: Any, reply: Callable[[Any], None]) -> None:
            if not isinstance(message, PrefixBackward):
                super().handle(message, reply)
                return
            answers: list[Any] = []
            super().handle(message, answers.append)
            self._ready.gradients[WRONG].mul_(2.0)  # the step's only unit: nothing of an earlier one is in the arena
            for answer in answers:
                reply(answer)

    return Wrong(segments)


if __name__ == "__main__":
    run(Role.PREFIX, make)
