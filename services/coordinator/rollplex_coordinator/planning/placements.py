"""Four ways to place rollout and training on the same devices, each as the ledger's planned blocks.

Owns: which blocks a placement has and in which phases they live, and what is assumed for that. Sizes come from `ranks`,
blocks of our own placement from `memory.budget`, arithmetic from `decisions.peaks`.

    naive          every role has its own copy of the weights, and everything is there at once
    serial         rollout's copy and its K/V are there while it samples; a graph and gradients while it is trained
    disaggregated  rollout on devices of its own
    rollplex       one storage of the weights; prefixes apart from suffixes; units wait for each other
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as changed

from rollplex.journal.phases import Phase
from rollplex.protocol.common import HOST_INDEX, Device, Kind, Role
from rollplex_coordinator.decisions.peaks import PlannedBlock
from rollplex_coordinator.memory.budget import ALWAYS, planned_blocks
from rollplex_coordinator.memory.names import ENGINE_SCRATCH, ROLLOUT_KV
from rollplex_coordinator.planning.question import Question, share_of
from rollplex_coordinator.planning.ranks import RankSizes

NAMES = ("naive", "serial", "disaggregated", "rollplex")
SAMPLED = frozenset({Phase.ROLLOUT, Phase.EVAL})
SCORED = frozenset({Phase.SCORE, Phase.TRAIN})
TRAINED = frozenset({Phase.TRAIN})
UPDATED = frozenset({Phase.TRAIN, Phase.UPDATE})
HOST = Device(index=HOST_INDEX)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Blocks of one device of each sort: devices of one sort are alike."""

    name: str
    blocks: tuple[PlannedBlock, ...]
    sorts: dict[int, tuple[str, tuple[int, ...]]]
    """By the index that blocks name: what the devices do, and which they are."""
    assumptions: tuple[str, ...]


def place(name: str, question: Question) -> Placement:
    """The placement of this name.

    Raises:
        ConfigError: as `RankSizes`.
        KeyError: there is none.
    """
    made = {"naive": _naive, "serial": _serial, "disaggregated": _disaggregated, "rollplex": _rollplex}
    placement = made[name](question)
    if not question.optimizer_on_host:
        return placement
    ranks = len(placement.sorts[0][1])
    blocks = [_on_host(block, ranks) if block.kind is Kind.OPTIMIZER_STATE else block for block in placement.blocks]
    return replace(
        placement,
        blocks=tuple(blocks),
        assumptions=(
            *placement.assumptions,
            (
                "optimizer state of all training ranks is in host memory (memory.optimizer: host), and passes through "
                "the device in pieces in UPDATE, which memory.overhead covers"
            ),
        ),
    )


def _on_host(block: PlannedBlock, ranks: int) -> PlannedBlock:
    return changed(block, device=HOST, size_bytes=block.size_bytes * ranks)


def disaggregated_sides(question: Question) -> tuple[Question, Question]:
    """The devices that train and those that sample, each with the largest degree up to the asked one that they hold."""
    trainers, samplers = question.gpus - question.rollout_gpus, question.rollout_gpus
    training, rollout = _degree(question.training, trainers), _degree(question.rollout, samplers)
    trained = replace(question, gpus=trainers, training=training, rollout=training, rollout_gpus=0)
    return trained, replace(question, gpus=samplers, training=rollout, rollout=rollout, rollout_gpus=0)


def _degree(wanted: int, devices: int) -> int:
    return next(n for n in range(wanted, 0, -1) if wanted % n == 0 and devices % n == 0)


def _rollplex(question: Question) -> Placement:
    sizes = RankSizes(question)
    device = Device()
    blocks = _of_replica(question, sizes, device)
    return Placement(
        name="rollplex",
        blocks=(*blocks, _overhead(question, device)),
        sorts=_all(question),
        assumptions=(
            (
                "one storage of the actor weights, the wider of the training and the rollout shard; the reference "
                "stores what is trained, a training shard of it"
            ),
            f"two gradient arenas ({question.config.model.dtype}), one of suffixes and one of prefixes",
            (
                "a prompt's prefix is computed once for its group; prefix batches wait for memory, so that one of them "
                "must fit"
            ),
            _suffixes(question),
            *_not_yet(question),
        ),
    )


def _of_replica(question: Question, sizes: RankSizes, device: Device) -> list[PlannedBlock]:
    """What a run asks for, with as many units as one replica has."""
    return planned_blocks(share_of(question.config, question.replicas), sizes, question.data, device)


def _naive(question: Question) -> Placement:
    sizes, device = RankSizes(question), Device()
    blocks = [
        *_trainer(question, sizes, device),
        *_engine(question, sizes, device),
        _overhead(question, device),
    ]
    return Placement(
        name="naive",
        blocks=tuple(changed(block, phases=ALWAYS) for block in blocks),
        sorts=_all(question),
        assumptions=(
            (
                "every role has a whole copy of the weights, in its own shards: trainer and reference by training TP, "
                "rollout by rollout TP"
            ),
            *_whole_sequences(question),
            "nothing is ever given back: K/V, graph, gradients and optimizer state are there at once",
        ),
    )


def _serial(question: Question) -> Placement:
    sizes, device = RankSizes(question), Device()
    return Placement(
        name="serial",
        blocks=(
            *_trainer(question, sizes, device),
            *_engine(question, sizes, device),
            _overhead(question, device),
        ),
        sorts=_all(question),
        assumptions=(
            (
                "rollout's copy of the weights and its K/V are there in ROLLOUT only, a graph in TRAIN, gradients in "
                "TRAIN and UPDATE; the trainer's and the reference's weights and the optimizer state stay"
            ),
            *_whole_sequences(question),
        ),
    )


def _disaggregated(question: Question) -> Placement:
    training, rollout = disaggregated_sides(question)
    trainer, sampler = Device(), Device(index=training.gpus)
    sizes, engine = RankSizes(training.checked()), RankSizes(rollout.checked())
    sizes.weights_bytes = sizes.training_weights_bytes
    blocks = [x for x in _of_replica(training, sizes, trainer) if x.owner != Role.ROLLOUT]
    return Placement(
        name="disaggregated",
        blocks=(
            *blocks,
            *(changed(block, phases=ALWAYS) for block in _engine(rollout, engine, sampler)),
            _overhead(training, trainer),
            _overhead(rollout, sampler),
        ),
        sorts={
            trainer.index: (f"training, TP {training.training}", tuple(range(training.gpus))),
            sampler.index: (f"rollout, TP {rollout.rollout}", tuple(range(training.gpus, question.gpus))),
        },
        assumptions=(
            (
                f"{training.gpus} devices train and {rollout.gpus} sample, each side idle while the other works but "
                "in the window of prefixes; TP degrees are the largest up to the asked ones that these devices hold"
            ),
            f"after each update every sampling device gets {_gib(engine.rollout_weights_bytes)} GiB from others",
            "the training side works as Rollplex does: shared prefixes, two gradient arenas",
            "the sampling side gives nothing back: nobody else could use it",
            _suffixes(training),
            *_not_yet(training),
        ),
    )


def _trainer(question: Question, sizes: RankSizes, device: Device) -> list[PlannedBlock]:
    """Of a system that trains whole sequences."""
    sequences = sizes.whole_sequences(question.data, question.micro_batch)
    blocks = [
        _block(device, Kind.ACTOR_WEIGHTS, "trainer", "training shard", sizes.training_weights_bytes, ALWAYS),
        _block(device, Kind.GRADIENTS, "trainer", "of whole sequences", sizes.baseline_gradient_bytes, UPDATED),
        _block(device, Kind.OPTIMIZER_STATE, "trainer", question.config.optimizer.name, sizes.optimizer_bytes, ALWAYS),
        _block(device, Kind.WORKSPACE, "trainer", "graph of a micro-batch", sequences["graph"], TRAINED),
        _block(device, Kind.WORKSPACE, "trainer", "logits", sequences["logits"], SCORED),
    ]
    if scratch := sequences.get("scratch"):
        blocks.append(_block(device, Kind.WORKSPACE, "trainer", "train scratch", scratch, SCORED))
    if question.config.needs_reference:
        weights = sizes.training_weights_bytes
        blocks.append(_block(device, Kind.REFERENCE_WEIGHTS, "reference", "a whole copy", weights, ALWAYS))
    return blocks


def _engine(question: Question, sizes: RankSizes, device: Device) -> list[PlannedBlock]:
    """Of an engine with weights of its own."""
    bounds = sizes.bounds(question.data)
    blocks = [
        _block(device, Kind.ACTOR_WEIGHTS, "rollout", "rollout shard, a copy", sizes.rollout_weights_bytes, SAMPLED),
        _block(device, Kind.ROLLOUT_KV, "rollout", ROLLOUT_KV, bounds[ROLLOUT_KV], SAMPLED),
    ]
    if scratch := bounds.get(ENGINE_SCRATCH):
        blocks.append(_block(device, Kind.WORKSPACE, "rollout", ENGINE_SCRATCH, scratch, SAMPLED))
    return blocks


def _whole_sequences(question: Question) -> Sequence[str]:
    kept = question.config.memory.prefix_activations
    gradients = question.baseline_gradients or question.config.model.dtype
    return (
        (
            f"a backward is of {question.micro_batch} whole sequences of {question.prompt_tokens} + "
            f"{question.response_tokens} tokens at once, keeping what memory.prefix_activations says ({kept}); prompts "
            "are computed again for each response"
        ),
        f"one gradient arena ({gradients}); the reference and a scoring pass keep no graph",
    )


def _suffixes(question: Question) -> str:
    config = share_of(question.config, question.replicas)
    sequences = config.suffix_prompts * config.rollout.group_size
    return (
        f"a suffix batch is {sequences} responses of {question.response_tokens} tokens (whole groups) at once; its "
        "graph keeps everything, whatever memory.prefix_activations says"
    )


def _not_yet(question: Question) -> list[str]:
    """What the plan takes for granted and a run does not do."""
    if question.shape.kv_heads >= question.training:
        return []
    heads = question.shape.kv_heads
    return [f"{question.training} training ranks share {heads} K/V heads: storage allows that, passes refuse it yet"]


def _overhead(question: Question, device: Device) -> PlannedBlock:
    config = question.config
    size = config.overhead_bytes // config.parallel.devices
    return _block(device, Kind.OVERHEAD, "processes", "memory.overhead", size, ALWAYS)


def _block(  # noqa: PLR0917 - a line of a table
    device: Device, kind: Kind, owner: str, purpose: str, size: int, phases: frozenset[Phase]
) -> PlannedBlock:
    return PlannedBlock(device=device, kind=kind, owner=owner, purpose=purpose, size_bytes=size, phases=phases)


def _all(question: Question) -> dict[int, tuple[str, tuple[int, ...]]]:
    return {0: ("all alike", tuple(range(question.gpus)))}


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"
