"""A whole test of one program."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rollplex.conformance.cases import Kit, Sittings
from rollplex.conformance.prefix import PrefixKit
from rollplex.conformance.report import Report
from rollplex.conformance.rollout import RolloutKit
from rollplex.conformance.sitting import Limits, Sheet
from rollplex.conformance.trainer import TrainerKit
from rollplex.conformance.world import World
from rollplex.errors import ConfigError
from rollplex.protocol.common import Role

KITS: Final[Mapping[Role, Callable[[World], Kit]]] = {
    Role.ROLLOUT: RolloutKit,
    Role.PREFIX: PrefixKit,
    Role.TRAINER: TrainerKit,
}


def conformance(
    role: Role,
    command: Sequence[str],
    *,
    limits: Limits | None = None,
    cases: Sequence[str] = (),
    stop: bool = False,
    model: Path | None = None,
) -> Report:
    """Start the program again and again, drive it through the protocol, and judge it.

    Args:
        command: the program and its arguments; `--run-dir DIR --device 0:0 --incarnation 1` follow.
        limits: None: as a node has them.
        cases: judge only these; only the processes that they need are started. Empty: all.
        stop: at the first failure.
        model: a folder that gets the tiny model, or has it from another test. None: a new one.

    Raises:
        ConfigError: no such role, or the program cannot be started.
    """
    if role not in KITS:
        raise ConfigError("There is no conformance test for this role", got=role, needed=", ".join(KITS))
    sheet = Sheet(cases, stop=stop)
    with tempfile.TemporaryDirectory(prefix="rpx-model-") as folder:
        world = World(model or Path(folder) / "model", Path(folder))
        try:
            Sittings(command, world, KITS[role], limits or Limits(), sheet).hold()
        finally:
            world.close()
    return Report(role=role, command=tuple(command), verdicts=tuple(sheet.verdicts), log=sheet.log)
