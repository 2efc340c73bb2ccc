"""serial, overlap and stream: the same bits, and each does what its name says. All facts come from the journal."""

from __future__ import annotations

import itertools
import json

import pytest

from rollplex.journal.events import (
    EvalDone,
    EvalStarted,
    GroupFinished,
    IterationStarted,
    LeaseGranted,
    LeaseReleased,
    PhaseEntered,
    StageDone,
    UnitDone,
    UnitKind,
    UpdateBegin,
    UpdateCommitted,
)
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Kind
from support.files import events_in, scalars_in
from support.nodes import Finished, Project, Start

pytestmark = pytest.mark.timeout(300)  # whichever test comes first starts four nodes
ITERATIONS = 5
SCHEDULES = ("serial", "overlap", "stream")
EVALUATED = "overlap with evaluations"
STAGES = {
    *("import", "control API", "processes", "data check", "memory plan", "load model", "import rewards"),
    *(f"{role} process" for role in ("input", "reward", "trainer", "prefix", "rollout")),
    *(f"load {role}" for role in ("trainer", "prefix", "rollout")),
}
FORWARDS = {UnitKind.REFERENCE_PREFIX, UnitKind.ACTOR_PREFIX}


@pytest.fixture(scope="module")
def runs(start: Start, project: Project) -> dict[str, Finished]:
    """The same five iterations under each schedule, and under overlap again, with evaluations between them."""
    evaluation = {"data": str(project.folder / "data" / "held_out.jsonl"), "every": 2, "limit": 6}
    found = {}
    for name in (*SCHEDULES, EVALUATED):
        overrides: dict[str, object] = {"run.schedule": name.split()[0]}
        if name == EVALUATED:
            overrides["eval"] = evaluation
        node = start("--iterations", str(ITERATIONS), overrides=overrides)
        found[name] = node.wait()
        assert found[name].code == 0, found[name].stderr
    return found


def timeless(run: Finished) -> list[str]:
    """metrics.jsonl without what depends on the clock."""
    return [json.dumps({k: v for k, v in row.items() if not k.startswith("time/")}) for row in run.metrics]


def test_the_rewards_of_these_runs_have_spread(runs: dict[str, Finished]) -> None:
    for row in runs["serial"].metrics:
        assert row["reward_std"] > 0.1
        assert row["frac_reward_zero_std"] == 0.0


def test_schedules_leave_bitwise_equal_weights_and_optimizer_state(runs: dict[str, Finished]) -> None:
    serial = runs["serial"].checkpoint()
    assert any("optimizer" in name for name in serial)
    assert any("model" in name for name in serial)
    for name in (*SCHEDULES[1:], EVALUATED):
        assert runs[name].checkpoint() == serial, name
    digests = {name: [e.digest for e in run.of(UpdateCommitted)] for name, run in runs.items()}
    assert digests["overlap"] == digests["serial"] == digests["stream"] == digests[EVALUATED]
    assert len(set(digests["serial"])) == ITERATIONS


def test_the_same_seed_gives_the_same_metrics_apart_from_times_whether_it_is_evaluated_or_not(
    runs: dict[str, Finished],
) -> None:
    assert len(runs["overlap"].metrics) == ITERATIONS
    assert timeless(runs["overlap"]) == timeless(runs[EVALUATED])
    assert timeless(runs["serial"]) == timeless(runs["stream"]) == timeless(runs["overlap"])


def test_each_evaluation_has_a_beginning_a_result_and_every_response(runs: dict[str, Finished]) -> None:
    run = runs[EVALUATED]
    steps = [0, 2, 4, 5]
    assert [(row["name"], row["step"], row["count"]) for row in run.evals] == [("held_out", s, 6.0) for s in steps]
    begun = [(e.name, e.step, e.version, e.rows) for e in run.of(EvalStarted)]
    assert begun == [(e.name, e.step, e.version, 6) for e in run.of(EvalDone)]
    rows = [json.loads(line) for line in (run.run_dir / "completions.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["source"] == "held_out"] == [s for s in steps for _ in range(6)]
    assert [row["step"] for row in rows if row["source"] == "train"] == [s for s in range(ITERATIONS) for _ in range(3)]


def test_tensorboard_has_the_numbers_of_every_row(runs: dict[str, Finished]) -> None:
    run = runs[EVALUATED]
    scalars = scalars_in(run.run_dir)
    trained = [(step, values) for step, values in scalars if "loss" in values]
    assert [step for step, _ in trained] == list(range(ITERATIONS))
    assert [values["reward"] for _, values in trained] == pytest.approx([row["reward"] for row in run.metrics])
    evaluated = [step for step, values in scalars if "eval/held_out/reward" in values]
    assert evaluated == [0, 2, 4, 5]


def test_the_first_iteration_has_a_table_of_samples_with_pictures(runs: dict[str, Finished]) -> None:
    run = runs["overlap"]
    page = (run.run_dir / "samples" / "step_0.html").read_text()
    assert page.count('src="data:image/png;base64,iVBORw0KGgo') == 4
    table = json.loads((run.run_dir / "samples" / "step_0.json").read_text())
    rows = run.of(IterationStarted)[0].rows
    assert [group["row"] for group in table["groups"]] == list(rows)
    for group in table["groups"]:
        assert "<|image_pad|>" in group["prompt"]
        advantages = [response["advantage"] for response in group["responses"]]
        assert len(advantages) == 3
        assert abs(sum(advantages)) < 1e-9 < max(advantages)
    lines = [json.loads(line) for line in (run.run_dir / "completions.jsonl").read_text().splitlines()]
    of_table = {"source", "step", "version", "row", "group"}  # said once, not with each response
    bare = [{key: value for key, value in line.items() if key not in of_table} for line in lines[:3]]
    assert table["groups"][0]["responses"] == bare
    assert len({(run.run_dir / "samples" / "step_0.json").read_bytes() for run in runs.values()}) == 1
    values = {value.tag: value for event in events_in(run.run_dir) for value in event.summary.value}
    assert "| response | advantage | reward |" in values["samples"].tensor.string_val[0].decode()
    assert values["samples/group_3"].image.encoded_image_string.startswith(b"\x89PNG")


def test_the_parts_of_the_start_lie_between_the_process_and_the_first_iteration(runs: dict[str, Finished]) -> None:
    for run in runs.values():
        stages = {stage.name: stage for stage in run.of(StageDone)}
        assert set(stages) == STAGES
        first = min(record.monotonic_s for record in run.records if isinstance(record.event, IterationStarted))
        assert all(stages["import"].start_s <= stage.start_s <= stage.end_s <= first for stage in stages.values())


def test_latest_leads_to_the_newest_checkpoint(runs: dict[str, Finished]) -> None:
    for run in runs.values():
        latest = run.run_dir / "checkpoints" / "latest"
        assert latest.readlink().name == f"step_{ITERATIONS}"
        assert (latest / "config.json").is_file()


def rollout_windows(run: Finished) -> dict[int | None, tuple[float, float]]:
    """Begin and end of the ROLLOUT phase of each step."""
    windows = {}
    events = run.of(PhaseEntered)
    for event, after in itertools.pairwise(events):
        if event.phase == Phase.ROLLOUT.name:
            windows[event.step] = (event.start_s, after.start_s)
    return windows


def share_of_forwards_inside(run: Finished) -> float:
    windows = rollout_windows(run)
    units = [unit for unit in run.of(UnitDone) if unit.kind in FORWARDS]
    inside = [u for u in units if windows[u.step][0] <= u.start_s and u.end_s <= windows[u.step][1]]
    assert len(units) == ITERATIONS * 4 * 2
    return len(inside) / len(units)


def test_overlap_hides_prefix_forwards_in_the_rollout_and_serial_hides_none(runs: dict[str, Finished]) -> None:
    assert share_of_forwards_inside(runs["overlap"]) >= 0.9
    assert share_of_forwards_inside(runs["stream"]) >= 0.9
    assert share_of_forwards_inside(runs["serial"]) == 0.0


def test_stream_trains_a_group_before_the_last_one_finishes(runs: dict[str, Finished]) -> None:
    def early(run: Finished) -> int:
        last = {step: max(g.end_s for g in run.of(GroupFinished) if g.step == step) for step in range(ITERATIONS)}
        return sum(u.end_s < last[u.step] for u in run.of(UnitDone) if u.kind is UnitKind.SUFFIX)

    assert early(runs["stream"]) >= ITERATIONS
    assert early(runs["overlap"]) == 0


def test_nobody_reads_weights_between_begin_and_commit(runs: dict[str, Finished]) -> None:
    for run in runs.values():
        begins = {e.step: r.monotonic_s for r in run.records if isinstance(e := r.event, UpdateBegin)}
        commits = {e.step: r.monotonic_s for r in run.records if isinstance(e := r.event, UpdateCommitted)}
        assert sorted(begins) == sorted(commits) == list(range(ITERATIONS))
        for unit in run.of(UnitDone):
            assert all(unit.end_s <= begins[s] or unit.start_s >= commits[s] for s in begins)


def test_the_vision_tower_runs_once_per_prompt_and_model(runs: dict[str, Finished]) -> None:
    for run in runs.values():
        for kind in (UnitKind.GENERATE, *FORWARDS):
            assert sum(u.vision_prompts for u in run.of(UnitDone) if u.kind is kind) == ITERATIONS * 4


def test_rollout_and_trainer_log_probabilities_agree_at_temperature_0_7(runs: dict[str, Finished]) -> None:
    for row in runs["overlap"].metrics:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4


def test_private_memory_is_within_five_per_cent_of_its_lease(runs: dict[str, Finished]) -> None:
    for run in runs.values():
        measured = [lease for lease in run.of(LeaseReleased) if lease.held_bytes is not None]
        kinds = {lease.kind for lease in measured}
        assert kinds >= {Kind.ROLLOUT_KV, Kind.REFERENCE_PREFIX_KV, Kind.PREFIX_ACTIVATIONS, Kind.WORKSPACE}
        for lease in measured:
            assert lease.held_bytes is not None
            assert abs(lease.held_bytes - lease.size_bytes) <= 0.05 * lease.size_bytes, lease


def test_only_one_lease_of_actor_weights_exists(runs: dict[str, Finished]) -> None:
    for run in runs.values():
        assert sum(lease.kind is Kind.ACTOR_WEIGHTS for lease in run.of(LeaseGranted)) == 1
