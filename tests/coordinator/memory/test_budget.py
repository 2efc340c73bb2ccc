"""Whether a configuration fits: the smallest budget that does is enough for whole iterations, one byte less is not."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollplex.errors import BudgetError
from rollplex.journal.events import IterationDone, LeaseGranted
from rollplex.journal.phases import Phase
from rollplex.memory.placement import taken_bytes
from rollplex.memory.predict import pool_kv_bytes
from rollplex.protocol.common import Kind, Memory, Role
from rollplex_coordinator.memory.budget import plan_memory, planned_blocks
from rollplex_coordinator.memory.names import (
    OWN_WEIGHTS,
    PREFIX_BACKWARD,
    PREFIX_SCRATCH,
    ROLLOUT_KV,
    SCORE_WORKSPACE,
    TRAIN_SCRATCH,
    TRAIN_WORKSPACE,
)
from rollplex_coordinator.memory.sizes import Sizes
from rollplex_coordinator.steps.iteration import Iteration
from support.core import AMPLE, DEVICE, Core, check_data, make_config, minimum_bytes

KINDS = ("actor_weights", "gradients", "optimizer_state", "reference_weights", "inputs", "rollout K/V")


def reserved(folder: Path, budget_bytes: int = AMPLE, **sections: Any) -> dict[str, frozenset[Phase]]:
    config = make_config(folder, **sections)
    found = plan_memory(config, Sizes(config), check_data(config), DEVICE, budget_bytes)
    return {reservation.name: reservation.phases for reservation in found}


def test_the_smallest_budget_is_accepted_and_one_byte_less_refused_with_the_table(model_folder: Path) -> None:
    least = minimum_bytes(model_folder, {})
    reserved(model_folder, least)
    with pytest.raises(BudgetError) as caught:
        reserved(model_folder, least - 1)
    text = str(caught.value)
    for word in (*KINDS, TRAIN_WORKSPACE, SCORE_WORKSPACE, "largest of 2 units that can wait", "minimum", "budget"):
        assert word in text
    assert re.search(r"short by +.*\b1\b", text)
    assert "ROLLOUT" in text
    assert f"a budget of {least - 1:,} bytes" in text


def test_what_a_configuration_does_without_is_not_planned_for(model_folder: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        reserved(model_folder, 1, algorithm={"beta": 0.0})
    assert "reference" not in str(caught.value)
    assert SCORE_WORKSPACE not in reserved(model_folder, algorithm={"beta": 0.0})
    assert minimum_bytes(model_folder, {"algorithm": {"beta": 0.0}}) < minimum_bytes(model_folder, {})


def test_engines_are_planned_with_what_they_keep(model_folder: Path) -> None:
    def planned(**rollout: Any) -> tuple[Sizes, dict[tuple[str, str], int]]:
        sections: dict[str, Any] = {"device": {"kind": "cuda"}, "model": {"dtype": "bfloat16"}, "rollout": rollout}
        config = make_config(model_folder, **sections)
        data = check_data(config)
        sizes = Sizes(config, longest_prompt=data.sources[0].max_prompt_tokens)
        return sizes, {(b.owner, b.purpose): b.size_bytes for b in planned_blocks(config, sizes, data, DEVICE)}

    sizes, sglang = planned(engine="sglang", sglang={"kv_tokens": 500})
    assert sglang[Role.ROLLOUT, ROLLOUT_KV] == pool_kv_bytes(sizes.wants.passes.shape, kv_tokens=500, dtype="bfloat16")
    assert (Role.ROLLOUT, OWN_WEIGHTS) not in sglang
    _, own = planned(engine="sglang", sglang={"kv_tokens": 500, "own_weights": True})
    assert own[Role.ROLLOUT, OWN_WEIGHTS] == taken_bytes(sizes.table.total_bytes, Memory.CUDA)
    _, replayed = planned(engine="replay", replay="a.jsonl")
    assert replayed[Role.ROLLOUT, ROLLOUT_KV] == 0


def test_private_blocks_are_reserved_for_the_phases_in_which_the_schedule_uses_them(model_folder: Path) -> None:
    overlap = reserved(model_folder, run={"schedule": "overlap"})
    assert overlap == {
        ROLLOUT_KV: {Phase.ROLLOUT, Phase.EVAL},
        TRAIN_WORKSPACE: {Phase.SCORE, Phase.TRAIN},
        SCORE_WORKSPACE: {Phase.SCORE},
    }
    stream = reserved(model_folder, run={"schedule": "stream"})
    assert stream[TRAIN_WORKSPACE] == {Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN}
    assert stream[SCORE_WORKSPACE] == {Phase.ROLLOUT, Phase.SCORE}


def test_where_schedules_take_turns_each_iteration_keeps_free_what_its_own_one_needs(
    model_folder: Path, tmp_path: Path
) -> None:
    turns = ("stream", "overlap", "stream", "serial")
    alone = {schedule: reserved(model_folder, run={"schedule": schedule}) for schedule in turns}
    config = make_config(model_folder, run={"alternate": turns}, data={"prompts_per_iteration": 2})
    with Core(config, tmp_path, random.Random(0), AMPLE) as core:
        assert kept(core) == alone["stream"], "what any of them needs is planned for"
        for step, schedule in enumerate(turns):
            core.record.step = step
            Iteration(core.context, step=step, rows=(0, 1), ahead=(0, 1)).run()
            assert kept(core) == alone[schedule]


def kept(core: Core) -> dict[str, frozenset[Phase]]:
    (device,) = core.memory.view().devices
    return {
        reservation.name: frozenset(Phase[name] for name in reservation.phases) for reservation in device.reservations
    }


@pytest.mark.parametrize("schedule", ["serial", "overlap", "stream"])
def test_recomputed_prefixes_need_one_units_graph_at_a_time_and_only_in_a_backward(
    model_folder: Path, schedule: str
) -> None:
    sections: dict[str, Any] = {"run": {"schedule": schedule}, "memory": {"prefix_activations": "recompute"}}
    phases = reserved(model_folder, **sections)
    assert phases[PREFIX_BACKWARD] == phases[TRAIN_WORKSPACE]
    assert PREFIX_BACKWARD not in reserved(model_folder, run={"schedule": schedule})
    config = make_config(model_folder, **sections)
    blocks = planned_blocks(config, Sizes(config), check_data(config), DEVICE)
    assert Kind.PREFIX_ACTIVATIONS not in {block.kind for block in blocks}
    (backward,) = [block for block in blocks if block.purpose == PREFIX_BACKWARD]
    assert (backward.owner, backward.unit) == (Role.PREFIX, "")


def test_on_a_gpu_what_passes_hold_for_a_moment_is_kept_free(model_folder: Path) -> None:
    config = make_config(model_folder, device={"kind": "cuda"})
    sizes, data = Sizes(config), check_data(config)
    found = plan_memory(config, sizes, data, DEVICE, AMPLE, host_bytes=AMPLE)
    on_gpu = {reservation.name: reservation.phases for reservation in found}
    assert on_gpu[PREFIX_SCRATCH] == {Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN}
    assert on_gpu[TRAIN_SCRATCH] == on_gpu[TRAIN_WORKSPACE]
    assert not {PREFIX_SCRATCH, TRAIN_SCRATCH} & reserved(model_folder).keys()
    bounds, shape = sizes.bounds(data), sizes.wants.passes.shape
    largest_gradient = 4 * shape.hidden * max(shape.vocab, 2 * shape.intermediate)
    assert bounds[PREFIX_SCRATCH] >= bounds[TRAIN_SCRATCH] > largest_gradient


def test_smaller_prefix_batches_need_a_smaller_budget(model_folder: Path) -> None:
    budgets = [minimum_bytes(model_folder, {"batching": {"prefix_prompts": n}}) for n in (1, 2, 4)]
    assert budgets == sorted(set(budgets))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_iterations_never_run_out_of_the_smallest_budget(seed: int, model_folder: Path, tmp_path: Path) -> None:
    """Also with the inputs of the next step made meanwhile."""
    rng = random.Random(seed)
    sections = {
        "run": {
            "schedule": rng.choice(["serial", "overlap", "stream"]),
            "alternate": rng.choice([(), (), ("stream", "overlap", "serial"), ("overlap", "stream")]),
            "share_prefix": rng.random() < 0.7,
        },
        "data": {"prompts_per_iteration": 4},
        "algorithm": {"beta": rng.choice([0.0, 0.1])},
        "batching": {"decode_prompts": rng.choice([0, 1, 3]), "prefix_prompts": rng.choice([0, 1, 2])},
        "memory": {"prefix_activations": rng.choice(["keep", "recompute"])},
    }
    least = minimum_bytes(model_folder, sections)
    with Core(make_config(model_folder, **sections), tmp_path, rng, least) as core:
        rows = [tuple(rng.sample(range(30), 4)) for _ in range(4)]
        for step in range(3):
            core.record.step = step
            Iteration(core.context, step=step, rows=rows[step], ahead=rows[step + 1]).run()
            core.ledger.check_integrity()
            assert max(core.memory.view().devices[0].peak_bytes.values()) <= least
        assert len(core.events(IterationDone)) == 3
        assert core.events(LeaseGranted)
