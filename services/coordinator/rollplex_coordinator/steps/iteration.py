"""One iteration: inputs, step, gate, and the metrics of it.

Owns the order of these and the names of the metrics. TRL's names where TRL has the quantity.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

from rollplex.config import wire
from rollplex.config.checks import TRAIN
from rollplex.data.order import epochs
from rollplex.journal.events import IterationDone, IterationStarted
from rollplex.journal.phases import Phase
from rollplex_coordinator.decisions.busy import idle_s
from rollplex_coordinator.decisions.instructions import Mode
from rollplex_coordinator.decisions.plan import plan_step
from rollplex_coordinator.decisions.reported import finite, part_means
from rollplex_coordinator.decisions.schedule import Schedule
from rollplex_coordinator.decisions.spread import mean_std
from rollplex_coordinator.memory.budget import reserved_for
from rollplex_coordinator.records.completions import Completion, Spoken, completions_of
from rollplex_coordinator.records.sample_table import table_of
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.feed import StepInputs
from rollplex_coordinator.steps.gathered import Gathered
from rollplex_coordinator.steps.step import TrainStep
from rollplex_coordinator.steps.update import Update


class Iteration:
    """One step of training. When the workers have been replaced in the middle of it, `run` does it again; or, if its
    update was settled by then, what is left of it.

    Args:
        step: its number, from 0.
        rows: of the training data, in the order of their groups.
        ahead: the next step's rows, to prepare meanwhile; None if no step follows.
    """

    def __init__(self, context: Context, *, step: int, rows: tuple[int, ...], ahead: tuple[int, ...] | None) -> None:
        self._c = context
        self._step = step
        self._rows = rows
        self._ahead = ahead
        self._version = context.record.version
        self._started_s = 0.0
        self._inputs: StepInputs
        self._gathered: Gathered
        self._update: Update

    def run(self) -> dict[str, object]:
        """Do it; pumps until the weights are at the next version, or the update was skipped. Returns its metrics."""
        if self._c.gate.step == self._step:
            self._do()
        return self._finish()

    def _do(self) -> None:
        """Up to the end of its update."""
        c = self._c
        self._started_s = time.monotonic()
        c.record.phase_seconds.clear()
        if c.config.run.alternate:  # else all steps are alike
            c.memory.cover(reserved_for(c.config, c.sizes, c.config.run.schedule_of(self._step)))
        c.feed.prepare_step(self._step, self._rows)
        self._inputs = c.feed.take(self._step)
        if self._ahead is not None:
            c.feed.prepare_step(self._step + 1, self._ahead)
        c.samples.ask(self._step, self._rows)
        config = c.config
        plan = plan_step(
            len(self._rows),
            decode_prompts=config.decode_prompts,
            prefix_prompts=config.prefix_prompts,
            suffix_prompts=config.suffix_prompts,
            engines=len(c.fleet.engines),
            replicas=len(c.fleet.trainers),
        )
        c.gate.begin_step(self._step, plan.num_groups, [unit.groups for unit in plan.prefix])
        c.record.append(IterationStarted(step=self._step, version=self._version, rows=self._rows))
        schedule = Schedule(
            plan,
            Mode(config.run.schedule_of(self._step)),
            reference=config.needs_reference,
            batch_rewards=config.algorithm.scale_rewards == "batch",
            after_prefill=config.device.window == "decode",
        )
        self._gathered = TrainStep(c, plan, schedule, self._inputs).run()
        self._update = Update(c)
        self._update.run()

    def _finish(self) -> dict[str, object]:
        """Its numbers; nothing is asked of a worker any more."""
        c, inputs, gathered, update = self._c, self._inputs, self._gathered, self._update
        c.record.open_groups = ()
        c.feed.done(inputs)
        c.record.enter(Phase.IDLE)
        c.memory.enter(Phase.IDLE)
        metrics = {**update.metrics, **_reward_metrics(c, gathered), **self._token_metrics(inputs, gathered)}
        metrics["updated"] = float(c.record.version > self._version)
        if c.config.rollout.engine == "replay":
            metrics["replayed"] = 1.0
        seconds = time.monotonic() - self._started_s
        times = {"time/step_s": seconds} | self._device_times(update, gathered, seconds)
        return self._write(metrics, gathered, times)

    def _device_times(self, update: Update, gathered: Gathered, seconds: float) -> dict[str, float]:
        """How long copying and having nothing to do took, where there are several devices."""
        if self._c.fleet.single:
            return {}
        idle = idle_s(self._c.fleet.devices, (*gathered.spans, *update.spans), seconds)
        times = {f"time/idle/{device}_s": value for device, value in idle.items()}
        return times if update.publish_s is None else {"time/publish_s": update.publish_s, **times}

    def _token_metrics(self, inputs: StepInputs, gathered: Gathered) -> dict[str, float]:
        """Numbers of tokens (media in their expanded form) and of passes over the data, all as TRL counts them."""
        c = self._c
        prompts = [slot.tokens for slot in inputs.prompts]
        responses = sum(sum(group.lengths) for group in gathered.responses.values())
        c.record.num_tokens += sum(prompts) * c.config.rollout.group_size + responses
        return {
            "prompts/mean_length": statistics.fmean(prompts),
            "prompts/max_length": float(max(prompts)),
            "completions/total_tokens": float(responses),
            "num_tokens": float(c.record.num_tokens),
            "epoch": epochs(self._step + 1, len(self._rows), c.data.usable(TRAIN), shuffle=c.config.data.shuffle),
        }

    def _write(self, metrics: dict[str, float], gathered: Gathered, more_times: dict[str, float]) -> dict[str, object]:
        """metrics.jsonl: what depends on the clock has the prefix time/."""
        c, version = self._c, self._version
        times = {f"time/{phase.name.lower()}_s": value for phase, value in c.record.phase_seconds.items()}
        times |= more_times
        if c.memory.observers is not None:
            times |= c.memory.observers.metrics()
        times["time/prefix_in_window"] = _share_inside(gathered.prefix_spans, gathered.rollout_span)
        row: dict[str, object] = {"step": self._step, "version": version}
        row |= {name: value if math.isfinite(value) else None for name, value in {**metrics, **times}.items()}
        completions = self._completions(version, gathered)
        c.record.metrics(row, [item for item in completions if item.group < c.config.run.log_completions])
        self._write_samples(version, gathered, completions)
        c.record.append(IterationDone(step=self._step, version=c.record.version, metrics={**metrics, **times}))
        return row

    def _write_samples(self, version: int, gathered: Gathered, completions: list[Completion]) -> None:
        wanted = self._c.samples.wanted(self._step)
        if wanted:
            table = table_of(
                step=self._step,
                version=version,
                rows=self._rows[:wanted],
                functions=[function.name for function in self._c.config.rewards.functions],
                completions=completions,
                skipped={group: f"{why.function}: {why.detail}" for group, why in gathered.skipped.items()},
            )
            self._c.samples.write(table)

    def _completions(self, version: int, gathered: Gathered) -> list[Completion]:
        """Of the first groups, as many as are kept for anything; one that is skipped has no texts."""
        names = [function.name for function in self._c.config.rewards.functions]
        algorithm = wire.algorithm(self._c.config)
        return [
            completion
            for group, message in sorted(gathered.rewarded.items())
            for completion in completions_of(
                message,
                source=TRAIN,
                version=version,
                row=self._rows[group],
                group=group,
                lengths=gathered.responses[group].lengths,
                stopped=gathered.stopped[group],
                names=names,
                advantages=gathered.advantages(group, algorithm),
                spoken=_spoken(gathered, group) if self._c.config.run.log_tokens else None,
            )
        ]


def _spoken(gathered: Gathered, group: int) -> Spoken:
    return Spoken(
        tokens=gathered.responses[group],
        rollout=gathered.rollout_logprobs[group],
        trainer=gathered.trainer_logprobs[group],
    )


def _reward_metrics(c: Context, gathered: Gathered) -> dict[str, float]:
    names = [function.name for function in c.config.rewards.functions]
    metrics: dict[str, float] = {"skipped_groups": float(len(gathered.skipped))}
    for index, name in enumerate(names):
        values = [v for group in sorted(gathered.by_function) for v in finite(gathered.by_function[group][index])]
        mean, std = mean_std(values) if values else (math.nan, 0.0)
        metrics[f"rewards/{name}/mean"] = mean
        metrics[f"rewards/{name}/std"] = std
    metrics |= part_means(names, [part for group in sorted(gathered.parts) for part in gathered.parts[group]])
    lengths = [n for group in sorted(gathered.responses) for n in gathered.responses[group].lengths]
    stopped = [s for group in sorted(gathered.stopped) for s in gathered.stopped[group]]
    metrics |= _lengths("length", lengths)
    metrics |= _lengths("terminated_length", [n for n, s in zip(lengths, stopped, strict=True) if s] or [0])
    metrics["completions/clipped_ratio"] = 1.0 - sum(stopped) / len(stopped)
    return metrics


def _lengths(name: str, lengths: Sequence[int]) -> dict[str, float]:
    return {
        f"completions/mean_{name}": statistics.fmean(lengths),
        f"completions/min_{name}": float(min(lengths)),
        f"completions/max_{name}": float(max(lengths)),
    }


def _share_inside(spans: Sequence[tuple[float, float]], window: tuple[float, float]) -> float:
    """The part of the spans' total time that lies inside the window; 0 without spans."""
    total = sum(end - start for start, end in spans)
    inside = sum(max(0.0, min(end, window[1]) - max(start, window[0])) for start, end in spans)
    return inside / total if total else 0.0
