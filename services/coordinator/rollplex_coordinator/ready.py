"""From started processes to a node that is ready for steps: data, memory plan, weights, rewards, gate.

    data check ─► memory plan ─► rewards ─► same run as before? ─► everybody has joined ─► load or restore ─► ready

Owns the order of these. Knows nothing of iterations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rollplex.config.config import Config
from rollplex.config.host import budget_bytes, host_budget_bytes
from rollplex.config.wire import train_sampling
from rollplex.journal.phases import Phase
from rollplex.multiprocessors.beside import Beside, Silent
from rollplex.protocol.common import Loaded, Role
from rollplex.protocol.common import Memory as MemoryKind
from rollplex_coordinator.control import CoreControl
from rollplex_coordinator.decisions.fleet import DEVICE
from rollplex_coordinator.decisions.gate import Gate
from rollplex_coordinator.decisions.ledger import Ledger
from rollplex_coordinator.decisions.window import window_of
from rollplex_coordinator.fingerprints import ModelFingerprint, fingerprints
from rollplex_coordinator.memory.budget import host_place, scratch_of
from rollplex_coordinator.memory.caps import caps_by_device
from rollplex_coordinator.memory.device_sizes import sizes_of
from rollplex_coordinator.memory.fleet_budget import plan_node
from rollplex_coordinator.memory.leasing import Memory
from rollplex_coordinator.options import Options
from rollplex_coordinator.processes.node import Node
from rollplex_coordinator.records.record import Record
from rollplex_coordinator.resuming import Resumption, judge_fingerprints, judge_libraries
from rollplex_coordinator.saying import say
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.feed import Feed, training_rows
from rollplex_coordinator.steps.loading import check_data, load_models, open_rewards
from rollplex_coordinator.steps.sampling import Samples
from rollplex_coordinator.verify.check import choose_row


def get_ready(
    node: Node,
    control: CoreControl,
    options: Options,
    roles: Sequence[Role],
    resumption: Resumption | None,
    *,
    first: int | None,
) -> Context:
    """Everything between the start of the processes and the first step. `control` learns of memory and gate.

    Args:
        roles: those that were started.
        resumption: the checkpoint to go on from; None: a new run.
        first: the step of training that comes next, whose inputs are made while models load; None: none was asked for.

    Raises:
        RollplexError: whatever keeps this node from running; what can be refused before the model is loaded, is.
    """
    config, verification = node.config, options.verify
    model_files = ModelFingerprint(config.model.path)
    node.link.await_peers([Role.INPUT], config.deadlines.start_s)
    data = check_data(node)
    plan_s = time.monotonic()
    if verification is not None:
        choose_row(data, verification.row)  # before anything is loaded
    longest = max(source.max_prompt_tokens for source in data.sources)
    sizes = sizes_of(config, node.fleet, whole=verification is not None, longest_prompt=longest)
    budget, host_bytes = budget_bytes(config, node.limit_bytes), host_budget_bytes()
    plan = plan_node(config, sizes, data, node.fleet, budget, host_bytes=host_bytes, free_bytes=node.free_bytes)
    ledger = Ledger(plan.budgets)
    kind = MemoryKind(config.device.kind)
    memory = Memory(ledger, node.holder, node.record, DEVICE, host_place(config, DEVICE), kind=kind)
    for reservation in plan.reservations:
        ledger.reserve(reservation)
    memory.scratch = scratch_of(plan.reservations)
    node.observe(memory, budget + config.overhead_bytes)
    memory.enter(Phase.LOAD)
    node.record.stage("memory plan", plan_s)
    control.memory = memory
    rewards: dict[str, str] = {}
    if Role.REWARD in roles:
        node.link.await_peers([Role.REWARD], config.deadlines.start_s)
        rewards = open_rewards(node, data)
    if resumption is not None and options.resume is not None:  # before anything is loaded
        found = fingerprints(data, _awaited(node, model_files), rewards)
        _warn(judge_fingerprints(resumption, found, options.resume.accepted))
    feed = Feed(node.link, memory, config.deadlines.unit_s)
    if first is not None:
        feed.prepare_step(first, training_rows(config, data, first))
    node.link.await_peers(roles, config.deadlines.start_s)
    notice = Silent() if node.gpus is None else Beside(node.run_dir)  # an engine looks for it as it loads
    restore = None if resumption is None else resumption.restore
    models = load_models(node, memory, sizes, data, restore, caps=caps_by_device(config, plan, sizes))
    found = fingerprints(data, _awaited(node, model_files), rewards)
    gate = Gate()
    if resumption is not None:
        _warn(judge_libraries(resumption, models.loaded[Role.TRAINER].libraries))
        gate = _go_on(resumption, node.record)
    if config.rollout.engine == "replay":
        say(f"rollplex: REPLAYED: responses come from {config.rollout.replay}, not from this run's weights")
    register_readers(gate, models.loaded, config)
    control.gate = gate
    context = Context(
        config=config,
        run_dir=node.run_dir,
        link=node.link,
        memory=memory,
        record=node.record,
        feed=feed,
        samples=Samples(node.link, node.record, config.run, config.deadlines.unit_s),
        gate=gate,
        sizes=sizes,
        data=data,
        sampling=train_sampling(config, stop_ids=data.stop_ids),
        window=window_of(
            None if node.gpus is None else node.gpus.sharing.used,
            prefix_share=config.device.prefix_share,
            decode_share=config.device.decode_share,
        ),
        fleet=node.fleet,
        notice=notice,
        loads=models.loads,
        digests=models.digests,
        fingerprints=found,
    )
    if node.observers is not None:
        node.observers.loaded()
    node.record.enter(Phase.IDLE)
    memory.enter(Phase.IDLE)
    return context


def register_readers(gate: Gate, loaded: Mapping[Role, Loaded], config: Config) -> None:
    """Those that read the weights are there.

    Raises:
        EngineError: the rollout does not sample from them.
    """
    replayed = config.rollout.engine == "replay"
    for role in (Role.PREFIX, Role.ROLLOUT):
        gate.register_reader(role, on_policy=loaded[role].on_policy, replayed=role is Role.ROLLOUT and replayed)


def _awaited(node: Node, files: ModelFingerprint) -> str:
    """A folder may take minutes to read: workers that come, and ask, are answered meanwhile."""
    limit_s = node.config.deadlines.load_s
    end_s = time.monotonic() + limit_s
    node.link.pump(lambda: files.done or time.monotonic() >= end_s)
    return files.result(limit_s)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}")


def _go_on(resumption: Resumption, record: Record) -> Gate:
    """The gate and the records as they were at the checkpoint."""
    state = resumption.state
    record.version = state.version
    record.go_on(state.step)
    return Gate(version=state.version, step=state.step, failed_votes=state.failed_votes)
