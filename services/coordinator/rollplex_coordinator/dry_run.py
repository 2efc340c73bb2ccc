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
from rollplex.protocol.inputs import DataChecked
from rollplex_coordinator.decisions.fleet import DEVICE
from rollplex_coordinator.decisions.peaks import peaks_table, plan_peak
from rollplex_coordinator.memory.budget import budgets_by_place, plan_memory, planned_blocks
from rollplex_coordinator.memory.sizes import Sizes
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
    open_rewards(node)
    budget, host_bytes = budget_bytes(config, node.limit_bytes), host_budget_bytes()
    sizes = Sizes(config, longest_prompt=max(source.max_prompt_tokens for source in data.sources))
    plan_memory(config, sizes, data, DEVICE, budget, host_bytes=host_bytes, free_bytes=node.free_bytes)
    lines = [f"{label:<14} {text}" for label, text in report(config, data, wanted)]
    if node.device is not None:
        shared = f"{_mib(node.device.free_bytes)} free; workers share it by {config.device.sharing}"
        lines.append(f"{'device':<14} {node.device.gpu.info}, {shared}")
    blocks = planned_blocks(config, sizes, data, DEVICE)
    peaks, *beside = plan_peak(blocks)
    whole = less_overhead(budget + config.overhead_bytes, config.overhead_bytes)
    needs = f"at least {_mib(peaks.minimum_bytes)}, and with {_mib(peaks.ample_bytes)} nothing waits"
    lines.append(f"{'memory':<14} {needs}; leases may take {_mib(budget)} ({whole})")
    for peak in beside:
        needs = f"at least {_mib(peak.minimum_bytes)}; leases may take {_mib(host_bytes)}"
        lines += [f"{'host memory':<14} {needs}"]
    budgets = budgets_by_place(config, DEVICE, budget, host_bytes)
    lines += ["", f"predicted bytes in each phase, {peaks_table(blocks, budgets)}"]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def report(config: Config, data: DataChecked, wanted: int) -> Iterator[tuple[str, str]]:
    """What would run: a label and a text for each line."""
    run, rollout = config.run, config.rollout
    yield "run", f"{run.name}: {f'{wanted} iterations' if wanted else 'waits for `rollplex start N`'}"
    shared = "once per prompt" if run.share_prefix else "once per response (run.share_prefix: false)"
    yield "schedule", f"{run.schedule}; prefixes are computed {shared}"
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
