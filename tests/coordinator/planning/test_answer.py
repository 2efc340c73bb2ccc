"""What a plan says of its placements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rollplex.planning.plan import Plan
from rollplex.planning.text import text_of
from rollplex_coordinator.planning.answer import answer
from rollplex_coordinator.planning.largest import largest, search
from rollplex_coordinator.planning.question import Question
from support.core import make_config
from support.slices import small_shape


@pytest.fixture
def question(tmp_path: Path) -> Question:
    return Question(
        config=make_config(tmp_path, rollout={"group_size": 3}),
        shape=small_shape(),
        model="small",
        gpus=4,
        training=4,
        rollout=2,
        rollout_gpus=2,
        hbm_bytes=2**40,
        prompt_tokens=9,
        image_tokens=4,
    )


def test_sums_peaks_and_causes_agree(question: Question) -> None:
    plan = answer(question)
    assert [one.name for one in plan.placements] == ["naive", "serial", "disaggregated", "rollplex"]
    for placement in plan.placements:
        for device in placement.devices:
            for phase in device.phases:
                assert phase.bytes == sum(phase.by_kind.values()) <= phase.ample_bytes
            assert device.peak_bytes == max(phase.bytes for phase in device.phases) <= device.ample_bytes
            assert device.causes[0].bytes == max(cause.bytes for cause in device.causes)
            assert device.fits
    weights = plan.weights
    assert weights.aliased_bytes + weights.refreshed_bytes + weights.rebuilt_bytes == weights.rollout_bytes
    assert weights.aliased_share == weights.aliased_bytes / weights.rollout_bytes
    assert plan.placements[1].devices[0].peak_phase in {"ROLLOUT", "TRAIN"}
    assert plan.placements[0].devices[0].peak_phase == "every phase"


def test_a_device_fits_up_to_its_last_byte(question: Question) -> None:
    peak = answer(question).placements[-1].devices[0].peak_bytes
    assert answer(replace(question, hbm_bytes=peak)).placements[-1].fits
    short = answer(replace(question, hbm_bytes=peak - 1))
    assert not short.placements[-1].fits
    assert "no, short by" in text_of(short)


def test_one_device_has_no_disaggregation(question: Question) -> None:
    plan = answer(replace(question, gpus=1, training=1, rollout=1, rollout_gpus=0))
    assert [one.name for one in plan.placements] == ["naive", "serial", "rollplex"]
    assert plan.weights.aliased_share == 1.0


def test_a_plan_is_json(question: Question) -> None:
    plan = answer(question)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize("name", ["naive", "serial", "disaggregated", "rollplex"])
def test_the_largest_fits_and_one_more_does_not(question: Question, name: str) -> None:
    at = {one.name: one for one in answer(question).placements}[name]
    tight = replace(question, hbm_bytes=max(device.peak_bytes for device in at.devices) + 50_000)
    found = largest(name, tight)

    def fits(changed: Question) -> bool:
        return {one.name: one for one in answer(changed).placements}[name].fits

    assert found.prompt_tokens >= question.prompt_tokens
    assert fits(replace(tight, prompt_tokens=found.prompt_tokens))
    assert not fits(replace(tight, prompt_tokens=found.prompt_tokens + 1))
    assert 1 <= found.batch <= found.batch_limit


def test_nothing_fits_into_nothing(question: Question) -> None:
    found = largest("rollplex", replace(question, hbm_bytes=1))
    assert (found.prompt_tokens, found.batch) == (0, 0)


@pytest.mark.parametrize("limit", range(1, 40))
def test_a_search_finds_the_last_that_fits(limit: int) -> None:
    assert search(lambda n: n <= limit, 1, 30) == min(limit, 30)
    assert search(lambda n: n <= limit, 7, 30) == (0 if limit < 7 else min(limit, 30))


def test_the_text_has_every_placement_and_every_assumption(question: Question) -> None:
    plan = answer(question)
    text = text_of(plan)
    flat = " ".join(text.split())
    for placement in plan.placements:
        for assumption in placement.assumptions:
            assert assumption in flat
    assert "training TP 4 (x 1), rollout TP 2 (x 2)" in text
    assert "peak in every phase" in text
