"""How much private memory each worker's allocator may take of a GPU: what it will be leased at most, and some slack.

    role      leased at once, at most                                             slack
    --------  ------------------------------------------------------------------  ------------------------------------
    prefix    all units that can wait, one scoring, one backward                  ALLOCATOR_SLACK_BYTES
    trainer   one suffix unit; at UPDATE the copies of gradients in float32       ALLOCATOR_SLACK_BYTES
    rollout   its K/V (for SGLang beside this cap, as a pool)                     ENGINE_SLACK_BYTES, logits of a batch

Each device has caps of its own, from its blocks and its share of the budget. A cap turns a wrong prediction into an
error of the worker that outgrew it, instead of one of whoever asks next. What the slack stands for is inside
`memory.overhead` in the ledger's books. Pure; on host memory nobody has a cap.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from rollplex.config.config import Config
from rollplex.journal.phases import Phase
from rollplex.layout.parameters import ParameterTable
from rollplex.protocol.common import HOST_INDEX, Device, Kind, Role
from rollplex_coordinator.decisions.peaks import PlannedBlock
from rollplex_coordinator.memory.fleet_budget import NodePlan
from rollplex_coordinator.memory.sizes import Sizes

ALLOCATOR_SLACK_BYTES = 2**30
"""Rounding of the allocator's blocks, cuBLAS workspaces, tensors of a unit that no formula names."""
ENGINE_SLACK_BYTES = 6 * 2**30
"""SGLang's CUDA graphs, buffers for the longest batch, activations of one prefill step and of its images."""
LOGIT_BYTES = 24
"""Of each running response and id: logits, float64 probabilities, their sum."""
UPDATE_CHUNK_BYTES = 64 * 2**20
"""The trainer converts gradients in pieces of this, or one parameter at a time if that is larger."""
STREAMED_COPIES = 6
"""Of a piece: the gradient as it was and widened, what is stepped, two moments, and one of the allocator's."""
PRIVATE = frozenset({Kind.ROLLOUT_KV, Kind.REFERENCE_PREFIX_KV, Kind.PREFIX_ACTIVATIONS, Kind.WORKSPACE})
"""Kinds that are no segments."""


class Caps(Struct, frozen=True, kw_only=True):
    """Bytes per worker; 0: no cap. rollout: beside SGLang's pool."""

    rollout: int = 0
    prefix: int = 0
    trainer: int = 0


def caps_by_device(config: Config, plan: NodePlan, sizes: Sizes) -> dict[Device, Caps]:
    """The caps of a run."""
    return {
        device: private_caps(
            config,
            [block for block in plan.blocks if block.device == device],
            sizes.trained,
            sizes.vocabulary,
            budget_bytes,
        )
        for device, budget_bytes in plan.budgets.items()
        if device.index != HOST_INDEX
    }


def private_caps(
    config: Config, blocks: Sequence[PlannedBlock], table: ParameterTable, vocabulary: int, budget_bytes: int
) -> Caps:
    """The caps of the workers of a device.

    Args:
        blocks: all that were planned of it.
        table: of the actor weights that are trained there.
        vocabulary: ids of the model.
        budget_bytes: what leases may take there; units that cannot all be alive under it are not counted.
    """
    if config.device.kind != "cuda":
        return Caps()
    running = config.rollout.sglang.max_running
    if config.rollout.engine != "sglang":
        running = config.decode_prompts * config.rollout.group_size
    pool = config.rollout.engine == "sglang"
    rollout = 0 if pool else leased_at_once(blocks, Role.ROLLOUT, budget_bytes)
    return Caps(
        rollout=rollout + ENGINE_SLACK_BYTES + running * vocabulary * LOGIT_BYTES,
        prefix=leased_at_once(blocks, Role.PREFIX, budget_bytes) + ALLOCATOR_SLACK_BYTES,
        trainer=max(
            leased_at_once(blocks, Role.TRAINER, budget_bytes), update_bytes(table, streamed=config.state_beside_gpu)
        )
        + ALLOCATOR_SLACK_BYTES,
    )


def leased_at_once(blocks: Sequence[PlannedBlock], role: Role, budget_bytes: int) -> int:
    """The most private memory that a role can be leased in any phase."""
    return max((_in_phase(blocks, role, phase, budget_bytes) for phase in Phase), default=0)


def _in_phase(blocks: Sequence[PlannedBlock], role: Role, phase: Phase, budget_bytes: int) -> int:
    alive = [block for block in blocks if phase in block.phases]
    ours = [block for block in alive if block.owner == role and block.kind in PRIVATE]
    others = sum(block.size_bytes for block in alive if not block.unit and block not in ours)
    return min(sum(block.size_bytes for block in ours), max(0, budget_bytes - others))


def update_bytes(table: ParameterTable, *, streamed: bool = False) -> int:
    """What the optimizer copies at once: gradients in float32, of weights that are bfloat16; if its state passes
    through the device, a piece of parameter, gradient and moments."""
    if streamed:
        return STREAMED_COPIES * UPDATE_CHUNK_BYTES
    if table.dtype != "bfloat16":
        return 0
    largest = max((entry.size_bytes for entry in table.trainable_entries), default=0)
    return UPDATE_CHUNK_BYTES + 2 * largest
