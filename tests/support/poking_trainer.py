"""A trainer that changes one element of one parameter, through transformers' module, when it is asked to
digest for the second time.

Used in place of the trainer service (`services.trainer`): what the other processes see then is what they map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollplex.protocol.common import DigestRequest, Role
from rollplex.worker import Segments, run


def make(segments: Segments) -> Any:
    from rollplex_trainer.service import TrainerService

    class Poking(TrainerService):
        asked = 0

        def handle(self, message: Any, reply: Callable[[Any], None]) -> None:
            self.asked += isinstance(message, DigestRequest)
            if isinstance(message, DigestRequest) and self.asked == 2:
                name = "model.language_model.layers.0.self_attn.k_proj.weight"
                with torch.no_grad():
                    dict(self._ready.model.named_parameters())[name][0, 0] += 1.0
            super().handle(message, reply)

    return Poking(segments)


if __name__ == "__main__":
    run(Role.TRAINER, make)
