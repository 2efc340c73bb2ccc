"""One verification, from a loaded node to a report.

Owns: which row, which passes in which order, what is compared with what. Nothing is updated: the weights are those of
model.path throughout, so that reference and actor are the same model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rollplex.config.checks import TRAIN
from rollplex.config.config import Config
from rollplex.errors import ConfigError, RollplexError, StateError
from rollplex.journal.phases import Phase
from rollplex.layout.parameters import gradient_table
from rollplex.protocol.common import Kind, Role
from rollplex.protocol.inputs import DataChecked
from rollplex.verify.report import Comparison, GradientDifference, LogprobDifference, Report, write
from rollplex_coordinator.memory.budget import COMPARER
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.memory.leasing import Want
from rollplex_coordinator.options import VerifyOptions
from rollplex_coordinator.saying import say
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.feed import StepInputs
from rollplex_coordinator.verify.compare import compare_gradients, compare_logprobs
from rollplex_coordinator.verify.gradients import Float64s, Gradients, read_only
from rollplex_coordinator.verify.passes import Passes, Split
from rollplex_coordinator.verify.tolerances import TOLERANCES, Tolerance

UNSPLIT = "split against unsplit"
REPLICATED = "shared against replicated"
ROLLOUT = "rollout against trainer"
REFERENCE = "reference against trainer"


def checked(config: Config) -> Config:
    """The configuration of a verification: one prompt at a time, no clipping, nothing that a verification does not do.
    Memory is planned for replicated prefixes, which hold the most."""
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"schedule": "serial", "share_prefix": False}),
            "data": config.data.model_copy(update={"prompts_per_iteration": 1}),
            "batching": type(config.batching)(),
            "optimizer": config.optimizer.model_copy(update={"max_grad_norm": 0.0}),
            "eval": (),
        }
    )


def choose_row(data: DataChecked, wanted: int | None) -> int:
    """The row to verify: the wanted one, or the first that can be used.

    Raises:
        ConfigError: there is no such row, or it cannot be used.
    """
    usable = data.usable(TRAIN)
    rows = range(usable) if isinstance(usable, int) else usable
    if not rows:
        raise ConfigError("The dataset has no row that can be used", where="data.path")
    if wanted is None:
        return rows[0]
    if wanted not in rows:
        last = next(source for source in data.sources if source.name == TRAIN).num_rows - 1
        raise ConfigError(
            "There is no such row, or it cannot be used",
            got=f"row {wanted}",
            needed=f"a good row of 0 to {last}",
            where="--row",
        )
    return wanted


class NotVerified(RollplexError):  # noqa: N818 - a finding as much as an error
    """Two ways to compute the same lie too far apart."""


def verify(context: Context, holder: Holder, options: VerifyOptions, config_file: Path) -> None:
    """Do one verification and write its report.

    Raises:
        NotVerified: a difference is beyond its tolerance; the report is written all the same.
        OSError: the report cannot be written.
    """
    report = Check(context, holder, options, config_file).run()
    write(report, options.report)
    if not report.passed:
        raise NotVerified(
            "The ways to compute a group do not agree",
            got=", ".join(comparison.name for comparison in report.comparisons if not comparison.passed),
            needed="differences within the tolerances",
            do=f"The report says where: {options.report}",
        )
    say("rollplex: verified")


class Check:
    """One verification.

    Args:
        context: a loaded node whose configuration is `checked`.
        holder: of its segments.
        options: row and tolerances.
        config_file: as the report names it.
    """

    def __init__(self, context: Context, holder: Holder, options: VerifyOptions, config_file: Path) -> None:
        self._c = context
        self._options = options
        self._config_file = config_file
        default = TOLERANCES[context.config.model.dtype]
        self._tolerance = Tolerance(
            logprobs=default.logprobs if options.logprob_tolerance is None else options.logprob_tolerance,
            gradients=default.gradients if options.gradient_tolerance is None else options.gradient_tolerance,
        )
        self._arena = _arena(context, holder)

    def run(self) -> Report:
        """Do it; pumps until the last pass is over."""
        c = self._c
        row = choose_row(c.data, self._options.row)
        c.feed.prepare(0, TRAIN, (row,))
        inputs = c.feed.take(0)
        copy = c.memory.now(_copy(c.sizes.gradient_bytes))
        passes = Passes(c, inputs)
        say(f"rollplex: verify: {c.config.rollout.group_size} responses to row {row}")
        sampled = passes.rollout()
        say("rollplex: verify: split, prefix shared")
        shared = passes.split(1)
        ours = self._arena.copied()
        passes.forget()
        say("rollplex: verify: whole sequences, one after the other")
        whole = passes.whole()
        unsplit = compare_gradients(ours, self._arena, self._tolerance.gradients)
        passes.forget()
        say("rollplex: verify: split, prefix replicated")
        replicated = passes.split(c.config.rollout.group_size)
        repeated = compare_gradients(ours, self._arena, self._tolerance.gradients)
        passes.forget()
        c.memory.release(copy)
        c.feed.done(inputs)
        c.record.step = None
        comparisons = [
            _comparison(UNSPLIT, self._logprobs(shared.trainer, whole, passes), unsplit),
            _comparison(REPLICATED, self._logprobs(shared.trainer, replicated.trainer, passes), repeated),
            _comparison(ROLLOUT, self._logprobs(sampled, shared.trainer, passes), None),
            *self._reference(shared, passes),
        ]
        return self._report(row, inputs, passes.lengths, comparisons)

    def _reference(self, shared: Split, passes: Passes) -> list[Comparison]:
        if shared.reference is None:
            return []
        return [_comparison(REFERENCE, self._logprobs(shared.reference, shared.trainer, passes), None)]

    def _logprobs(self, ours: Float64s, theirs: Float64s, passes: Passes) -> LogprobDifference:
        return compare_logprobs(ours, theirs, passes.lengths, self._tolerance.logprobs)

    def _report(
        self, row: int, inputs: StepInputs, lengths: tuple[int, ...], comparisons: Iterable[Comparison]
    ) -> Report:
        found, config = tuple(comparisons), self._c.config
        return Report(
            passed=all(comparison.passed for comparison in found),
            config=str(self._config_file),
            data=str(config.data.path),
            row=row,
            group_size=config.rollout.group_size,
            prompt_tokens=inputs.prompts[0].tokens,
            media=len(inputs.prompts[0].media),
            response_tokens=lengths,
            dtype=config.model.dtype,
            comparisons=found,
        )


def _comparison(name: str, logprobs: LogprobDifference, gradients: GradientDifference | None) -> Comparison:
    return Comparison(
        name=name,
        passed=logprobs.passed and (gradients is None or gradients.passed),
        logprobs=logprobs,
        gradients=gradients,
    )


def _arena(context: Context, holder: Holder) -> Gradients:
    """The trainer's arena, read in place."""
    for device in context.memory.view().devices:
        for lease in device.leases:
            if lease.kind is Kind.GRADIENTS and lease.producer == Role.TRAINER:
                held = holder.find(context.memory.segment_of(lease.id) or 0)
                if held is not None:
                    return Gradients(read_only(held.fd, held.ref.size_bytes), gradient_table(context.sizes.table))
    raise StateError("There is no gradient arena of the trainer", needed="a loaded node")


def _copy(size_bytes: int) -> Want:
    """The coordinator's own copy of the shared pass's gradients."""
    return Want(
        kind=Kind.GRADIENTS,
        size_bytes=size_bytes,
        owner=COMPARER,
        last_consumer=COMPARER,
        first=Phase.IDLE,
        last=Phase.DRAIN,
        purpose="gradients to compare with",
        on_host=True,
    )
