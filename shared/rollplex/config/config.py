"""The whole configuration of a run. It knows its keys and what they mean together; not files (see `loading`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rollplex.config.base import Section
from rollplex.config.checks import check
from rollplex.config.job import (
    CheckpointSection,
    DeadlinesSection,
    DeviceSection,
    EvalSection,
    HttpSection,
    MemorySection,
    ParallelSection,
    RunSection,
    ServicesSection,
)
from rollplex.config.learning import (
    AlgorithmSection,
    BatchingSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    RewardsSection,
    RolloutSection,
)
from rollplex.config.trackers import TrackersSection

HOST_OVERHEAD_BYTES = 1280 * 2**20
"""What a node's processes were seen to hold on a host before any tensor: 0.3 GiB for each of three workers (torch,
transformers), the rest for the others."""
WORKER_OVERHEAD_BYTES = 320 * 2**20
"""The same of each worker beyond those of one device."""
GPU_OVERHEAD_BYTES = 8 * 2**30
"""Of each GPU's HBM, beside leases: CUDA contexts of three workers and modules of their kernels, the MPS server,
SGLang's graphs and buffers; of several GPUs also NCCL's buffers, which were not measured."""


class Config(Section):
    """A run, checked: a `Config` that exists obeys every rule of `checks`.

    Raises:
        pydantic.ValidationError: a field's own rule is broken (`loading.load` makes a ConfigError of it).
        ConfigError: a rule about several fields is broken.
    """

    run: RunSection = RunSection()
    """The run as a whole."""
    model: ModelSection
    """Which model is trained."""
    data: DataSection
    """What it is trained on."""
    rollout: RolloutSection = RolloutSection()
    """How responses are sampled."""
    rewards: RewardsSection
    """What a response is worth."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Advantages and loss."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer and its learning rate."""
    batching: BatchingSection = BatchingSection()
    """How many prompts are computed together."""
    device: DeviceSection = DeviceSection()
    """What the workers compute on."""
    parallel: ParallelSection = ParallelSection()
    """Several devices: how the model is split over them, and which do what."""
    memory: MemorySection = MemorySection()
    """What the ledger may grant."""
    deadlines: DeadlinesSection = DeadlinesSection()
    """How long each kind of wait may last."""
    http: HttpSection = HttpSection()
    """The control API."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When weights and optimizer state are written."""
    eval: Annotated[tuple[EvalSection, ...], Field(max_length=63)] = ()
    """Evaluations; none by default. One alone may be written without the dash of a list."""
    services: ServicesSection = ServicesSection()
    """Other implementations of a service."""
    trackers: TrackersSection = TrackersSection()
    """Where numbers go beside the run directory."""

    @model_validator(mode="after")
    def _check(self) -> Config:
        check(self)
        return self

    @property
    def overhead_bytes(self) -> int:
        """`memory.overhead`, resolved."""
        if self.memory.overhead is not None:
            return self.memory.overhead
        if self.device.kind == "cuda":
            return GPU_OVERHEAD_BYTES * self.parallel.devices
        return HOST_OVERHEAD_BYTES + (self.parallel.workers - 3) * WORKER_OVERHEAD_BYTES

    @property
    def state_beside_gpu(self) -> bool:
        """Whether the optimizer's state lies in host memory while the rest is on a GPU."""
        return self.device.kind == "cuda" and self.memory.optimizer == "host"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is kept and run."""
        return self.algorithm.beta > 0.0

    @property
    def decode_prompts(self) -> int:
        """Prompts of one decode batch, resolved: between 1 and an engine's share of the prompts of an iteration."""
        return self.batching.decode_prompts or -(-self.data.prompts_per_iteration // self.parallel.engines)

    @property
    def prefix_prompts(self) -> int:
        """Prompts of one prefix batch, resolved: between 1 and a replica's share of the prompts of an iteration."""
        return self.batching.prefix_prompts or -(-self.data.prompts_per_iteration // self.parallel.replicas)

    @property
    def suffix_prompts(self) -> int:
        """Groups of one suffix batch, resolved: a divisor of `prefix_prompts`."""
        return self.batching.suffix_prompts or self.prefix_prompts
