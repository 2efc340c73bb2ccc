"""Fingerprints of what the configuration only names, for checkpoints and resumptions.

    data.<source>      rows and images, by the input child's check
    model              every file of the model folder
    rewards.<function> the source file that the function was imported from, by the reward child

The model's files are read in a thread of its own meanwhile, since loading reads them too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from rollplex.checkpoint.fingerprint import folder_fingerprint
from rollplex.errors import ModelError, RollplexError, WaitError
from rollplex.protocol.inputs import DataChecked


class ModelFingerprint:
    """The fingerprint of a model folder, being computed. The thread ends with the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._value = ""
        self._error: RollplexError | None = None
        self._thread = threading.Thread(target=self._compute, name="model fingerprint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `result` has it at once."""
        return not self._thread.is_alive()

    def result(self, waited_s: float) -> str:
        """The fingerprint, for whoever has waited long enough.

        Raises:
            ModelError: a file cannot be read.
            WaitError: it is not there, after `waited_s` seconds.
        """
        if not self.done:
            raise WaitError(
                "The model's files could not be read in time",
                got=f"more than {waited_s:g} s",
                do="Raise deadlines.load_s, or put the model on a faster disk.",
                where=str(self._folder),
            )
        if self._error is not None:
            raise self._error
        assert self._value, "the thread ends with a value or a ModelError"
        return self._value

    def _compute(self) -> None:
        try:
            self._value = folder_fingerprint(self._folder)
        except ModelError as error:
            self._error = error


def fingerprints(data: DataChecked, model: str, rewards: Mapping[str, str]) -> dict[str, str]:
    """All of a run, by name.

    Args:
        rewards: of each reward function, by its name.
    """
    found = {f"data.{source.name}": source.fingerprint for source in data.sources}
    return found | {"model": model} | {f"rewards.{name}": value for name, value in rewards.items()}
