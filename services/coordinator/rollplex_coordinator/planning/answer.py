"""From a question to a plan (`rollplex.planning.plan`).

Owns: sums by kind, the peak and its cause, what fits. Sizes and phases come from `placements`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rollplex.errors import ConfigError
from rollplex.journal.phases import Phase
from rollplex.planning.plan import Cause, DeviceHeld, PhaseHeld, PlacementHeld, Plan, Weights
from rollplex.protocol.common import HOST_INDEX
from rollplex_coordinator.decisions.peaks import DevicePeaks, PhasePeak, PlannedBlock, plan_peak
from rollplex_coordinator.planning.largest import largest
from rollplex_coordinator.planning.placements import NAMES, Placement, place
from rollplex_coordinator.planning.question import Question
from rollplex_coordinator.planning.ranks import RankSizes

_SHOWN = (Phase.LOAD, Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN, Phase.UPDATE)
"""In the others nothing lives but what is always there."""
CAUSES = 3
"""How many blocks are named as the cause of a peak."""


def answer(question: Question) -> Plan:
    """The plan.

    Raises:
        ConfigError: a question that cannot be asked (`Question.checked`).
    """
    question.checked()
    config = question.config
    return Plan(
        model=question.model,
        dtype=config.model.dtype,
        gpus=question.gpus,
        hbm_bytes=question.hbm_bytes,
        training_tp=question.training,
        rollout_tp=question.rollout,
        replicas=question.replicas,
        engines=question.engines,
        prompts_per_iteration=config.data.prompts_per_iteration,
        group_size=config.rollout.group_size,
        prompt_tokens=question.prompt_tokens,
        image_tokens=question.image_tokens,
        response_tokens=question.response_tokens,
        weights=_weights(RankSizes(question)),
        placements=tuple(_placement(name, question) for name in NAMES if name != NAMES[2] or question.rollout_gpus),
    )


def _weights(sizes: RankSizes) -> Weights:
    tally = sizes.tally
    return Weights(
        training_bytes=tally.training,
        rollout_bytes=tally.rollout,
        stored_bytes=tally.stored,
        aliased_bytes=tally.aliased,
        refreshed_bytes=tally.refreshed,
        rebuilt_bytes=tally.rebuilt,
        unsplit_bytes=sizes.unsplit_bytes,
        aliased_share=tally.aliased / tally.rollout,
    )


def _placement(name: str, question: Question) -> PlacementHeld:
    try:
        placement = place(name, question)
    except ConfigError as error:
        return PlacementHeld(name=name, refused=str(error))
    peaks = plan_peak(placement.blocks)
    held = tuple(_device(placement, peak, question) for peak in peaks if peak.device.index != HOST_INDEX)
    return PlacementHeld(
        name=name,
        devices=held,
        host_bytes=sum(peak.minimum_bytes for peak in peaks if peak.device.index == HOST_INDEX),
        fits=all(device.fits for device in held),
        largest=largest(name, question),
        assumptions=placement.assumptions,
    )


def _device(placement: Placement, peaks: DevicePeaks, question: Question) -> DeviceHeld:
    blocks = [block for block in placement.blocks if block.device == peaks.device]
    shown = (*_SHOWN, Phase.EVAL) if question.config.eval else _SHOWN
    phases = [peak for peak in peaks.phases if peak.phase in shown]
    worst = max(phases, key=lambda peak: peak.minimum_bytes)
    alike = len({peak.minimum_bytes for peak in phases}) == 1
    what, devices = placement.sorts[peaks.device.index]
    there = sorted(_there(blocks, worst), key=lambda block: -block.size_bytes)
    return DeviceHeld(
        what=what,
        devices=devices,
        phases=tuple(_phase(blocks, peak) for peak in phases),
        peak_bytes=worst.minimum_bytes,
        peak_phase="every phase" if alike else worst.phase.name,
        causes=tuple(
            Cause(kind=block.kind, owner=block.owner, purpose=block.purpose, bytes=block.size_bytes)
            for block in there[:CAUSES]
        ),
        ample_bytes=peaks.ample_bytes,
        fits=worst.minimum_bytes <= question.hbm_bytes,
    )


def _phase(blocks: Sequence[PlannedBlock], peak: PhasePeak) -> PhaseHeld:
    by_kind = Counter[str]()
    for block in _there(blocks, peak):
        by_kind[str(block.kind)] += block.size_bytes
    return PhaseHeld(
        phase=peak.phase.name, by_kind=dict(by_kind), bytes=peak.minimum_bytes, ample_bytes=peak.ample_bytes
    )


def _there(blocks: Sequence[PlannedBlock], peak: PhasePeak) -> list[PlannedBlock]:
    """What makes the minimum of a phase: what stands, and the largest unit."""
    units = {"", peak.largest_unit}
    return [block for block in blocks if peak.phase in block.phases and block.unit in units]
