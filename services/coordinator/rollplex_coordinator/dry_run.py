"""What `rollplex up --dry-run` does: all that is checked before a model is loaded, and a report of what would run.

    children ─► data check ─► reward functions imported ─► memory plan ─► report on the standard output

Owns the words of the report. Refusals are those of a real run: the same functions check.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rollplex.config.config import Config
from rollplex.config.host import budget_bytes, host_budget_bytes, less_overhead
from rollplex.journal.phases import Phase
from rollplex.protocol.common import HOST_INDEX
from rollplex.protocol.inputs import DataChecked
from rollplex_coordinator.decisions.fleet import fleet_of
from rollplex_coordinator.decisions.peaks import peaks_table, plan_peak
from rollplex_coordinator.memory.device_sizes import sizes_of
from rollplex_coordinator.memory.fleet_budget import NodePlan, plan_node
from rollplex_coordinator.processes.node import CHILDREN, Node
from rollplex_coordinator.steps.loading import check_data, open_rewards


def dry_run(node: Node, wanted: int) -> None:
    """Check, and write the report.

    Args:
        wanted: iterations that would run.

    Raises:
        RollplexError: as a real run that cannot start.
    """
    config = node.config
    node.record.enter(Phase.LOAD)
    for role in CHILDREN:
        node.start(role)
    node.link.await_peers(CHILDREN, config.deadlines.start_s)
    data = check_data(node)
    open_rewards(node, data)
    budget, host_bytes = budget_bytes(config, node.limit_bytes), host_budget_bytes()
    sizes = sizes_of(config, node.fleet, longest_prompt=max(source.max_prompt_tokens for source in data.sources))
    plan = plan_node(config, sizes, data, node.fleet, budget, host_bytes=host_bytes, free_bytes=node.free_bytes)
    lines = [f"{label:<14} {text}" for label, text in report(config, data, wanted)]
    lines += [f"{'device':<14} {text}" for text in _gpu_lines(node)]
    whole = less_overhead(budget + config.overhead_bytes, config.overhead_bytes)
    lines += [f"{label:<14} {text}" for label, text in memory_report(plan, budget, whole)]
    lines += ["", f"predicted bytes in each phase, {peaks_table(plan.blocks, plan.budgets)}"]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _gpu_lines(node: Node) -> Iterator[str]:
    for device, one in () if node.gpus is None else node.gpus.devices.items():
        which = "" if node.fleet.single else f"{device}: "
        shared = f"{_mib(one.free_bytes)} free; workers share it by {node.config.device.sharing}"
        yield f"{which}{one.gpu.info}, {shared}"


def memory_report(plan: NodePlan, budget_bytes: int, whole: str) -> Iterator[tuple[str, str]]:
    """What each device needs and has: a label and a text for each line.

    Args:
        budget_bytes: what leases may take on all devices; whole: from what that is left.
    """
    peaks = plan_peak(plan.blocks)
    several = sum(peak.device.index != HOST_INDEX for peak in peaks) > 1
    if several:
        parts = "inputs once, the rest in equal shares" if plan.once_bytes else "in equal shares"
        yield "memory", f"leases may take {_mib(budget_bytes)} ({whole}): {parts}"
    for peak in peaks:
        may = plan.budgets.get(peak.device, 0)
        if peak.device.index == HOST_INDEX:
            yield "host memory", f"at least {_mib(peak.minimum_bytes)}; leases may take {_mib(may)}"
            continue
        label = f"device {peak.device}" if several else "memory"
        needs = f"at least {_mib(peak.minimum_bytes)}, and with {_mib(peak.ample_bytes)} nothing waits"
        yield label, f"{needs}; leases may take {_mib(may)}{'' if several else f' ({whole})'}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def devices_text(config: Config) -> str:
    """How several devices are used."""
    parallel, fleet = config.parallel, fleet_of(config)
    trained = f"training TP {parallel.training} x {len(fleet.trainers)}"
    sampled = f"rollout TP {parallel.rollout} x {len(fleet.engines)} engines"
    where = "on the same devices"
    if parallel.placement == "disaggregated":
        where = f"the last {parallel.rollout_devices} only sample, from copies of the weights"
    return f"{parallel.devices}: {trained} replicas, {sampled}; {where}"


def report(config: Config, data: DataChecked, wanted: int) -> Iterator[tuple[str, str]]:
    """What would run: a label and a text for each line."""
    run, rollout = config.run, config.rollout
    yield "run", f"{run.name}: {f'{wanted} iterations' if wanted else 'waits for `rollplex start N`'}"
    shared = "once per prompt" if run.share_prefix else "once per response (run.share_prefix: false)"
    yield "schedule", f"{run.schedule}; prefixes are computed {shared}"
    if config.parallel.devices > 1:
        yield "devices", devices_text(config)
    yield "model", f"{config.model.path}, {config.model.dtype}"
    reference = f"yes, algorithm.beta {config.algorithm.beta:g}" if config.needs_reference else "no, algorithm.beta 0"
    yield "reference", reference
    prompts = config.data.prompts_per_iteration
    tokens = f"{rollout.group_size} responses each, of at most {rollout.max_new_tokens} tokens"
    yield "iteration", f"{prompts} prompts, {tokens}"
    units = f"{config.decode_prompts} decoded, {config.prefix_prompts} prefixes, {config.suffix_prompts} suffixes"
    yield "batching", f"prompts that are computed together: {units}"
    for source in data.sources:
        rejected = f", {len(source.rejected)} rejected" if source.rejected else ""
        text = f"{source.name}: {source.num_rows} rows{rejected}, prompts of at most {source.max_prompt_tokens} tokens"
        yield "data", text
    yield "rewards", ", ".join(function.name for function in config.rewards.functions) + ": imported"
    for section in config.eval:
        often = f"every {section.every} iterations and at the end" if section.every else "at the end"
        yield "evaluation", f"{section.name}: {often}"
    when = [f"every {config.checkpoint.every} iterations"] if config.checkpoint.every else []
    every = " and ".join([*when, *(["at the end"] if config.checkpoint.at_end else [])]) or "never"
    yield "checkpoints", f"{every}; the newest {config.checkpoint.keep} are kept"
