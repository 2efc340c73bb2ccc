"""What a trainer has when it is loaded, whether it is alone or one of several ranks.

Owns: what both have in common, and what the service asks of either. Does not know: steps, stages, messages but the one
that it is made from.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rollplex.errors import StaleWeightsError
from rollplex.layout.shape import ModelShape
from rollplex.memory.header import HeaderPage
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import OptimizerViews
from rollplex.model.build import Model
from rollplex.model.device import limit_private
from rollplex.model.setup import prepare_torch
from rollplex.protocol.common import SegmentRef
from rollplex.protocol.trainer import LoadTrainer, Standing
from rollplex.worker.agreement import agreed_model
from rollplex_trainer.metrics import StepMetrics
from rollplex_trainer.optimizer import CHUNK_BYTES, SegmentOptimizer
from rollplex_trainer.streamed import StreamedOptimizer

_DECIDING = (
    "av",
    "jinja2",
    "numpy",
    "pillow",
    "rollplex",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
"""Packages that pixels, prompts, token ids or numbers come from."""
TRAINING_FOLDER = "training"
"""Inside a checkpoint; engines that read every *.safetensors of a model folder must not meet the optimizer's."""


class SegmentSource(Protocol):
    """What the trainer needs of `rollplex.worker.Segments`."""

    @property
    def run_id(self) -> str: ...

    def attach(self, ref: SegmentRef) -> Mapping: ...

    def attach_new(self, ref: SegmentRef) -> Mapping: ...

    def detach(self, segment: int) -> None: ...


class ReadyTrainer(ABC):
    """Everything of one trainer that lasts longer than a step."""

    several: bool
    """There are other trainers: weights are published by an instruction of its own, when all have stepped."""
    header: HeaderPage
    weights: MappingOf[str, Tensor]
    """What this process trains or would, without what only a rollout reads."""
    model: Model
    kv_shape: ModelShape
    """Whose K/V heads are those of this process."""
    arena: Tensor
    """This process's gradients, as one row of numbers."""
    prefix_arena: Tensor
    """Those of the prefix process beside it."""
    optimizer: SegmentOptimizer | StreamedOptimizer
    total_bytes: int
    """Of the weights that the segment holds."""
    place: Sequence[str] = ()
    """Which of several trainers this is, for errors."""

    def __init__(self, message: LoadTrainer, segments: SegmentSource) -> None:
        """Map the weights' segment; nothing is filled yet.

        `self._open` maps this process's own segments: as new ones, or with what an earlier trainer left in them.

        Raises:
            ModelError: the folder cannot be read, or the coordinator has another parameter table.
            SegmentError: a segment that is not what it should be.
        """
        spec = message.model
        self.device = prepare_torch(spec)
        self.private_bytes = message.private_bytes
        limit_private(self.device, message.private_bytes)
        self.algorithm = message.algorithm
        self.settings = message.optimizer
        self.never_sampled = spec.never_sampled
        self.folder = Path(spec.path)
        agreed = agreed_model(spec)
        self.shape, self.table = agreed.shape, agreed.table
        self._open = segments.attach_new if message.standing is None else segments.attach
        self.mapping = self._open(message.actor)

    @abstractmethod
    def sum_step(self, metrics: StepMetrics) -> StepMetrics:
        """Make the arena the sum of all trainers' that had other prompts; returns the metrics of all of them."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """Of the whole model; not finite if a number of any trainer is not."""

    @abstractmethod
    def keep_gradients(self, file: Path) -> int:
        """Write the whole model's gradients. Returns the file's bytes. Raises UpdateError."""

    @abstractmethod
    def begin_update(self, version: int) -> None:
        """From here on the weights of `version` may change. Raises StaleWeightsError, SegmentError."""

    @abstractmethod
    def weights_finite(self) -> bool:
        """Whether no number that this process steps is NaN or infinite."""

    @abstractmethod
    def end_update(self, version: int, digest: str) -> None:
        """The weights are those of `version` now. Of several: until they are published, they say nothing."""

    @abstractmethod
    def poison(self) -> None:
        """The weights are worthless."""

    @abstractmethod
    def digest(self) -> str:
        """Of the weights as they lie in the segment now."""

    @abstractmethod
    def checkpoint_digest(self, version: int) -> str:
        """Of the whole model's weights. Raises StaleWeightsError if they are not those of `version`."""

    @property
    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """About what `write_checkpoint` writes."""

    @abstractmethod
    def write_checkpoint(self, folder: Path, state_json: str) -> None:
        """Fill a folder: the model as `from_pretrained` wants it, and under `training` the optimizer's state (names
        `<kind>.<stored name>`, and `step`) and what the coordinator keeps.

        Raises:
            CheckpointError: a file cannot be written.
        """


def require_standing(header: HeaderPage, found: str, standing: Standing) -> None:
    """Whether what an earlier trainer left is what the run goes on with. found: its digest.

    Raises:
        StaleWeightsError: the header shows another version, or weights that may not be read; or the bytes are others.
        SegmentError: there are no weights.
    """
    header.require(standing.version)
    if found != standing.digest:
        raise StaleWeightsError(
            "The weights that an earlier process left are not those of the last update",
            got=f"digest {found}",
            needed=f"{standing.digest}, of version {standing.version}",
            do="Go on from the newest checkpoint: rollplex up CONFIG --resume.",
        )


def require_masters(weights: MappingOf[str, Tensor], state: OptimizerViews) -> None:
    """Whether what an earlier trainer left in full precision is what the weights were rounded from. Nothing tells of
    moments.

    Raises:
        StaleWeightsError: names the first parameter of which it is not.
    """
    for name, masters in state.states.get("master", {}).items():
        rows = max(1, CHUNK_BYTES // max(1, masters[0].nbytes))
        for start in range(0, len(masters), rows):
            master, weight = masters[start : start + rows], weights[name][start : start + rows]
            if not torch.equal(master.to(weight.dtype).to(weight.device), weight):
                raise StaleWeightsError(
                    "The optimizer's state that an earlier process left is not that of the weights",
                    got="master weights that do not round to them",
                    do="Go on from the newest checkpoint: rollplex up CONFIG --resume.",
                    where=name,
                )


def libraries(device: torch.device) -> dict[str, str]:
    """Versions of what decides the numbers of a run, for the manifest of a checkpoint."""
    return {
        "python": platform.python_version(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        **_gpu(device),
        **{name: _version(name) for name in _DECIDING},
    }


def _gpu(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    return {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
