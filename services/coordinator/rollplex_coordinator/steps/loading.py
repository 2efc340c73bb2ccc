"""From a checked configuration to a loaded node: data check, memory plan, weights, rewards.

    join(input) ─► OpenData ─► DataChecked ─► memory plan fits? ─► join(all) ─► segments ─► Load*
                                                                     │
                          of several trainers, when all have loaded: Publish

A configuration that does not fit is refused between DataChecked and the first segment: nothing was loaded yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, structs

from rollplex.config import wire
from rollplex.errors import ModelError, RewardError, StaleWeightsError
from rollplex.journal.events import ServiceReady, WeightsLoaded
from rollplex.protocol.common import Device, Kind, Loaded, Role
from rollplex.protocol.inputs import DataChecked, OpenData
from rollplex.protocol.reward import OpenRewards, RewardsOpened
from rollplex.protocol.trainer import Publish, Published, Restore, Standing
from rollplex_coordinator.decisions.columns import check_columns
from rollplex_coordinator.decisions.digests import check_replicas, combined
from rollplex_coordinator.decisions.fleet import DEVICE, Fleet, Team
from rollplex_coordinator.memory.caps import Caps
from rollplex_coordinator.memory.leasing import Memory
from rollplex_coordinator.memory.names import OWN_WEIGHTS
from rollplex_coordinator.memory.sizes import Sizes
from rollplex_coordinator.processes.hub import Peer
from rollplex_coordinator.processes.node import Node
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.loads import Load, Loads, meeting_files
from rollplex_coordinator.steps.segments import StandingSegments, standing

log = logging.getLogger("rollplex.coordinator")


class Models(Struct, frozen=True, kw_only=True):
    """What was loaded."""

    loaded: dict[Role, Loaded]
    """By role the first one's answer; on policy is a role whose processes all are."""
    digests: dict[Device, str]
    """Of the actor weights on each device that trains."""
    loads: Loads
    """What loads it."""


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
    caps: Mapping[Device, Caps] | None = None,
) -> Models:
    """Make the standing segments and have every worker map them; the trainer fills them, or restores a checkpoint.

    Args:
        caps: of the workers' private memory, by device; None: nobody has one.

    Raises:
        ModelError: a worker sees a parameter table of another size.
    """
    config, start_s, fleet = node.config, time.monotonic(), node.link.fleet
    spec = wire.model_spec(config, table_hash=sizes.table.hash, never_sampled=data.never_sampled)
    longest = max(source.max_prompt_tokens for source in data.sources)
    engine = wire.engine_spec(config, max_prompt_tokens=longest)
    segments = StandingSegments(memory, sizes, fleet, reference=config.needs_reference)
    if engine.own_weights:
        own = standing(Kind.ACTOR_WEIGHTS, sizes.table.total_bytes, Role.ROLLOUT, Role.ROLLOUT)
        memory.now(structs.replace(own, purpose=OWN_WEIGHTS, segment=False))
    loads = Loads(
        config,
        spec=spec,
        engine=engine,
        segments=segments,
        caps=caps or {},
        restore=restore,
        meets=meeting_files(node.run_dir, fleet),
    )

    def loaded(peer: Peer) -> None:
        _ready(node, peer)
        node.record.stage(f"load {fleet.name(peer.role, peer.device)}", start_s)

    found = _have_loaded(node, memory, sizes, loads, loaded)
    version = 0 if restore is None else restore.version
    digests = {DEVICE: found[Role.TRAINER].digest} if fleet.single else publish(node, version)
    if all(digests.values()):  # a trainer of others may not say it
        node.record.append(WeightsLoaded(version=version, digest=combined(digests)))
    node.record.stage("load model", start_s)
    return Models(loaded=found, digests=digests, loads=loads)


def load_of_trainer(c: Context, standing: Standing) -> tuple[Team, Load]:
    """The only trainer's team, and what a new one of it is told to load: what stands."""
    assert c.loads is not None, "a loaded node"
    told = c.loads.again({DEVICE: standing}, {}).all
    return next((team, make) for team, make in told if team.role is Role.TRAINER)


def load_again(node: Node, c: Context) -> dict[Role, Loaded]:
    """Have new workers map the standing segments, in which trainers find weights and optimizer state as they are.

    Raises:
        ModelError: a worker sees a parameter table of another size.
        WorkerFailed, StaleWeightsError: the weights are not those of the last update.
    """
    assert c.loads is not None, "a loaded node"
    stands = {device: Standing(version=c.record.version, digest=digest) for device, digest in c.digests.items()}
    loads = c.loads.again(stands, meeting_files(node.run_dir, node.link.fleet))
    found = _have_loaded(node, c.memory, c.sizes, loads, lambda peer: _ready(node, peer))
    told = found[Role.TRAINER].digest
    if c.fleet.single and told != c.digests[DEVICE]:  # a trainer of others may have filled them after all
        raise StaleWeightsError(
            "The new trainer has other weights than those of the last update",
            got=f"digest {told or '(none told)'}",
            needed=f"{c.digests[DEVICE]}, of version {c.record.version}",
            do="Go on from the newest checkpoint: rollplex up CONFIG --resume.",
            where=node.link.fleet.name(Role.TRAINER, DEVICE),
        )
    return found


def _ready(node: Node, peer: Peer) -> None:
    node.record.append(ServiceReady(service=str(peer), role=peer.role, incarnation=peer.incarnation))


def _have_loaded(
    node: Node, memory: Memory, sizes: Sizes, loads: Loads, loaded: Callable[[Peer], None]
) -> dict[Role, Loaded]:
    """loaded: told of each process that has."""
    fleet, told = node.link.fleet, loads.all
    pools = memory.now(sizes.wants.starting_pool(), fleet.rollout_devices) if sizes.pools else None
    node.loads = {team.role: (team, make) for team, make in reversed(told)}
    answers = node.link.call_teams(told, "load the model", node.config.deadlines.load_s, Loaded, loaded)
    if pools is not None:
        memory.release(pools)
        memory.trimmed(Role.ROLLOUT)
    return _checked(answers, [team for team, _ in told], sizes, fleet)


def publish(node: Node, version: int) -> dict[Device, str]:
    """Have several trainers bring every device's weights to `version`, which nobody may read before; their digests.

    Raises:
        StateError: replicas have different weights.
    """
    start_s = time.monotonic()
    published = node.link.call_teams(
        [(team, lambda cause, _: Publish(cause=cause, version=version)) for team in node.link.fleet.trainers],
        f"publish version {version} on every device",
        node.config.deadlines.load_s,
        Published,
    )
    devices = node.link.fleet.training_devices
    digests = {device: answer.digest for device, answer in zip(devices, published, strict=True)}
    check_replicas(node.link.fleet, digests)
    copied = sum(answer.refreshed_bytes + answer.rebuilt_bytes for answer in published)
    log.info("weights: %.1f MiB copied between devices", copied / 2**20)
    node.record.stage("publish weights", start_s)
    return digests


def open_rewards(node: Node, data: DataChecked) -> dict[str, str]:
    """Have the reward child import the user's functions; the fingerprint of each one's source, by its name.

    Raises:
        WorkerFailed: carries the RewardError of a function that cannot be imported.
        RewardError: one that some row lacks a column for, where an error of a function ends the run.
    """
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
    try:
        check_columns(data.sources, [function.function for function in config.rewards.functions], opened.required)
    except RewardError as error:
        if config.rewards.on_error == "fail":
            raise
        log.warning("rewards: groups of such rows will be left out: %s", error)
    return dict(zip(opened.names, opened.fingerprints, strict=True))


def _checked(answers: Sequence[Loaded], teams: Sequence[Team], sizes: Sizes, fleet: Fleet) -> dict[Role, Loaded]:
    """By role the first one's answer; on policy is a role whose processes all are."""
    found: dict[Role, Loaded] = {}
    ranks = [(team, rank) for team in teams for rank in range(len(team.devices))]
    for (team, rank), answer in zip(ranks, answers, strict=True):
        expected = sizes.segments_of(team.parallels[rank]).actor
        _check_loaded(fleet.name(team.role, team.devices[rank]), answer, expected)
        first = found.setdefault(team.role, answer)
        found[team.role] = structs.replace(first, on_policy=first.on_policy and answer.on_policy)
    return found


def _check_loaded(name: str, answer: Loaded, expected: int) -> None:
    if answer.table_bytes != expected:
        raise ModelError(
            f"the {name} service has another parameter table",
            got=f"{answer.table_bytes} bytes",
            needed=f"{expected} bytes",
            do="Run the same version of Rollplex in every process.",
        )
