"""From a checked configuration to a loaded node: data check, memory plan, weights, rewards.

    join(input) ─► OpenData ─► DataChecked ─► memory plan fits? ─► join(all) ─► segments ─► Load* ─► OpenRewards

A configuration that does not fit is refused between DataChecked and the first segment: nothing was loaded yet.
"""

from __future__ import annotations

import logging
import time

from msgspec.structs import replace

from rollplex.config import wire
from rollplex.errors import ModelError
from rollplex.journal.events import ServiceReady
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Kind, Loaded, Role, SegmentRef
from rollplex.protocol.inputs import DataChecked, OpenData
from rollplex.protocol.prefix import LoadPrefix
from rollplex.protocol.reward import OpenRewards, RewardsOpened
from rollplex.protocol.rollout import LoadRollout
from rollplex.protocol.trainer import LoadTrainer, Restore
from rollplex_coordinator.memory.caps import Caps
from rollplex_coordinator.memory.leasing import Blocks, Memory, Want
from rollplex_coordinator.memory.sizes import OWN_WEIGHTS, Sizes
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.processes.node import Node

log = logging.getLogger("rollplex.coordinator")


def check_data(node: Node) -> DataChecked:
    """Have every row of every dataset checked.

    Raises:
        WorkerFailed: carries the DataError that names the row.
    """
    config, start_s = node.config, time.monotonic()
    data = node.link.call(
        Role.INPUT,
        lambda cause: OpenData(
            cause=cause,
            model_path=str(config.model.path),
            sources=wire.data_sources(config),
            never_sample=config.rollout.never_sample,
            stop_tokens=config.rollout.stop_tokens,
        ),
        "check the data",
        config.deadlines.load_s,
        DataChecked,
    )
    for source in data.sources:
        rejected = f", {len(source.rejected)} rejected" if source.rejected else ""
        log.info(
            "data %s: %d rows%s, prompts of at most %d tokens",
            source.name,
            source.num_rows,
            rejected,
            source.max_prompt_tokens,
        )
        for why in (*source.warnings, *source.rejected):
            log.warning("data %s: %s", source.name, why)
    node.record.stage("data check", start_s)
    return data


def load_models(
    node: Node,
    memory: Memory,
    sizes: Sizes,
    data: DataChecked,
    restore: Restore | None = None,
    *,
    caps: Caps = Caps(),  # noqa: B008 - immutable
) -> dict[Role, Loaded]:
    """Make the standing segments and have every worker map them; the trainer fills them, or restores a checkpoint.

    Args:
        caps: of the workers' private memory.

    Raises:
        ModelError: a worker sees a parameter table of another size.
    """
    config, start_s = node.config, time.monotonic()
    spec = wire.model_spec(config, table_hash=sizes.table.hash, never_sampled=data.never_sampled)
    longest = max(source.max_prompt_tokens for source in data.sources)
    engine = wire.engine_spec(config, max_prompt_tokens=longest, private_bytes=caps.rollout)
    actor = memory.now(standing(Kind.ACTOR_WEIGHTS, sizes.table.total_bytes, Role.TRAINER, Role.ROLLOUT))
    reference = (
        memory.now(standing(Kind.REFERENCE_WEIGHTS, sizes.reference_bytes, Role.TRAINER, Role.PREFIX))
        if config.needs_reference
        else None
    )
    gradients = memory.now(standing(Kind.GRADIENTS, sizes.gradient_bytes, Role.TRAINER, Role.TRAINER))
    prefix_gradients = memory.now(standing(Kind.GRADIENTS, sizes.gradient_bytes, Role.PREFIX, Role.TRAINER))
    state = memory.now(standing(Kind.OPTIMIZER_STATE, sizes.optimizer_bytes, Role.TRAINER, Role.TRAINER))
    shared_reference = _ref(reference)
    if engine.own_weights:
        own = standing(Kind.ACTOR_WEIGHTS, sizes.table.total_bytes, Role.ROLLOUT, Role.ROLLOUT)
        memory.now(replace(own, purpose=OWN_WEIGHTS, segment=False))

    pool = memory.now(sizes.starting_pool()) if sizes.pools else None

    def loaded(peer: Peer) -> None:
        node.record.append(ServiceReady(service=str(peer), role=peer.role, incarnation=peer.incarnation))
        node.record.stage(f"load {peer.role}", start_s)

    answers = node.link.call_many(
        {
            Role.TRAINER: lambda cause: LoadTrainer(
                cause=cause,
                model=spec,
                actor=actor.ref,
                reference=shared_reference,
                gradients=gradients.ref,
                prefix_gradients=prefix_gradients.ref,
                optimizer_state=state.ref,
                algorithm=wire.algorithm(config),
                optimizer=wire.optimizer(config),
                restore=restore,
                private_bytes=caps.trainer,
            ),
            Role.PREFIX: lambda cause: LoadPrefix(
                cause=cause,
                model=spec,
                actor=actor.ref,
                reference=shared_reference,
                gradients=prefix_gradients.ref,
                temperature=config.rollout.temperature,
                private_bytes=caps.prefix,
            ),
            Role.ROLLOUT: lambda cause: LoadRollout(cause=cause, model=spec, actor=actor.ref, engine=engine),
        },
        "load the model",
        config.deadlines.load_s,
        Loaded,
        loaded,
    )
    for role, answer in answers.items():
        _check_loaded(role, answer, sizes)
    if pool is not None:
        memory.release(pool)
        memory.trimmed(Role.ROLLOUT)
    node.record.stage("load model", start_s)
    return answers


def open_rewards(node: Node) -> dict[str, str]:
    """Have the reward child import the user's functions; the fingerprint of each one's source, by its name."""
    config, start_s = node.config, time.monotonic()
    opened = node.link.call(
        Role.REWARD,
        lambda cause: OpenRewards(
            cause=cause,
            model_path=str(config.model.path),
            sources=wire.data_sources(config),
            functions=wire.reward_functions(config),
            time_limit_s=config.rewards.time_limit_s,
            memory_limit_bytes=config.rewards.memory_limit,
            workers=config.rewards.workers,
        ),
        "import the reward functions",
        config.deadlines.load_s,
        RewardsOpened,
    )
    for note in opened.notes:
        log.info("rewards: %s", note)
    node.record.stage("import rewards", start_s)
    return dict(zip(opened.names, opened.fingerprints, strict=True))


def standing(kind: Kind, size_bytes: int, owner: Role, last_consumer: Role) -> Want:
    """A segment that lives from LOAD to the end."""
    return Want(
        kind=kind,
        size_bytes=size_bytes,
        owner=owner,
        last_consumer=last_consumer,
        first=Phase.LOAD,
        last=Phase.DRAIN,
        purpose=f"{kind} of {owner}",
        segment=True,
    )


def _ref(block: Blocks | None) -> SegmentRef | None:
    return block.ref if block else None


def _check_loaded(role: Role, answer: Loaded, sizes: Sizes) -> None:
    if answer.table_bytes != sizes.table.total_bytes:
        raise ModelError(
            f"the {role} service has another parameter table",
            got=f"{answer.table_bytes} bytes",
            needed=f"{sizes.table.total_bytes} bytes",
            do="Run the same version of Rollplex in every process.",
        )
