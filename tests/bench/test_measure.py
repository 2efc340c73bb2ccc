"""From the files of a run to its row, on records written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollplex.bench.measure import measure, read_metrics
from rollplex.bench.rows import Mode, Row
from rollplex.errors import DataError
from rollplex.journal.events import Event, GroupFinished, MemoryObserved, UnitDone, UnitKind, UpdateCommitted
from rollplex.protocol.common import Device
from rollplex_coordinator.records.journal import Journal

OVERLAP = Mode(schedule="overlap", prefix="shared")
Measure = Callable[..., Row]


def _metrics(step: int, whole: float, **more: float | None) -> dict[str, object]:
    phases = {"rollout": 0.4, "score": 0.2, "train": 0.3, "update": 0.05, "idle": 0.01}
    times = {f"time/{name}_s": value * whole for name, value in phases.items()}
    return {"step": step, "version": step, "updated": 1.0, **times, "time/step_s": whole, **more}


def _unit(step: int, kind: UnitKind, start: float, end: float, decode: float | None = None) -> UnitDone:
    return UnitDone(step=step, kind=kind, unit=0, service="s", start_s=start, end_s=end, decode_start_s=decode)


def _step(step: int, at: float, decode: float | None = None) -> list[Event]:
    """Rollout from 0 to 4; the reference's prefix half inside it, the actor's after it."""
    units = (
        _unit(step, UnitKind.GENERATE, at, at + 4.0, decode),
        _unit(step, UnitKind.REFERENCE_PREFIX, at + 3.0, at + 5.0),
        _unit(step, UnitKind.ACTOR_PREFIX, at + 5.0, at + 7.0),
        _unit(step, UnitKind.SCORE, at + 7.0, at + 7.5),
        _unit(step, UnitKind.SUFFIX, at + 7.5, at + 9.0),
        _unit(step, UnitKind.PREFIX_BACKWARD, at + 9.0, at + 12.0),
    )
    lengths = (10, 20 + step)
    group = GroupFinished(step=step, group=0, row=3, lengths=lengths, end_s=at + 4.0)
    commit = UpdateCommitted(step=step, version=step + 1, digest=f"digest {step}", start_s=at, end_s=at)
    return [*units, group, commit]


@pytest.fixture
def measured(tmp_path: Path) -> Measure:
    """measured(metrics, events, warmup): the row of a run that left these."""

    def make(metrics: list[dict[str, object]], events: list[Event], warmup: int = 1) -> Row:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
        journal = Journal(tmp_path / "journal.sqlite")
        for event in events:
            keep = journal.append_durable if isinstance(event, UpdateCommitted) else journal.append
            keep(event)
        journal.close()
        return measure(
            tmp_path, OVERLAP, repeat=2, warmup=warmup, prompt_tokens=31.0, started="now", wall_s=9.0, others_cpus=0.5
        )

    return make


def test_iterations_after_the_warm_up_count_and_their_median_is_kept(measured: Measure) -> None:
    metrics = [_metrics(step, whole) for step, whole in enumerate((100.0, 2.0, 1.0, 4.0))]
    row = measured(metrics, [event for step in range(4) for event in _step(step, 100.0 * step)])
    assert row.iteration_s == (2.0, 1.0, 4.0)
    assert row.median_s["iteration"] == 2.0
    assert row.median_s["rollout"] == pytest.approx(0.8)
    assert row.median_s["other"] == pytest.approx(0.1)  # the idle part counts as other
    assert (row.mode, row.repeat, row.wall_s, row.others_cpus) == (OVERLAP, 2, 9.0, 0.5)


def test_units_are_summed_by_kind_and_the_window_is_the_rollout(measured: Measure) -> None:
    row = measured([_metrics(step, 12.0) for step in range(2)], [*_step(0, 0.0), *_step(1, 50.0)])
    seconds = row.median_s
    assert seconds["prefix_forward"] == pytest.approx(4.0)
    assert seconds["prefix_hidden"] == pytest.approx(1.0)
    assert row.hidden_share == pytest.approx(0.25)
    assert seconds["prefix_backward"] == pytest.approx(3.0)
    assert seconds["score_units"] == pytest.approx(0.5)
    assert seconds["suffix_units"] == pytest.approx(1.5)
    assert seconds["generate"] == pytest.approx(4.0)
    assert "decode" not in seconds


def test_tokens_a_second_and_the_part_of_prefix_work_that_is_hidden(measured: Measure) -> None:
    events = [
        msgspec.structs.replace(event, groups=(0,)) if isinstance(event, UnitDone) else event
        for step in range(2)
        for event in _step(step, 50.0 * step, decode=50.0 * step + 1.0)
    ]
    row = measured([_metrics(step, 12.0) for step in range(2)], events)
    assert row.prompts == 1
    assert row.decode_tokens_s == pytest.approx((10 + 21) / 3.0)
    assert row.prefix_tokens_s == pytest.approx(2 * 31.0 / 4.0)
    assert row.work_hidden == pytest.approx(0.25)  # half of the first of two forwards
    assert row.median_s["window"] == pytest.approx(7.0)


def test_peaks_of_a_gpu_are_by_phase_over_the_measured_iterations(measured: Measure) -> None:
    def seen(phase: str, step: int | None, used: int) -> MemoryObserved:
        return MemoryObserved(device=Device(node=0, index=0), phase=phase, used_bytes=used, segments_bytes=1, step=step)

    observed = [seen("ROLLOUT", 0, 99), seen("ROLLOUT", 1, 5), seen("ROLLOUT", 2, 7), seen("TRAIN", 1, 6)]
    observed.append(seen("LOAD", None, 98))
    steps = [event for step in range(3) for event in _step(step, 50.0 * step)]
    row = measured([_metrics(step, 12.0) for step in range(3)], [*observed, *steps])
    assert row.peak_bytes == {"rollout": 7, "train": 6}


def test_decode_begins_where_the_event_says(measured: Measure) -> None:
    row = measured([_metrics(step, 12.0) for step in range(2)], [*_step(0, 0.0, 1.0), *_step(1, 50.0, 51.5)])
    assert row.median_s["prefill"] == pytest.approx(1.5)
    assert row.median_s["decode"] == pytest.approx(2.5)


def test_tokens_are_those_of_the_measured_iterations_and_the_digest_is_the_last(measured: Measure) -> None:
    row = measured(
        [_metrics(step, 12.0) for step in range(3)], [e for step in range(3) for e in _step(step, 50.0 * step)]
    )
    assert row.response_tokens == pytest.approx((10 + 21 + 10 + 22) / 4)
    assert row.digest == "digest 2"
    assert row.prompt_tokens == 31.0


def test_prompt_tokens_are_the_metrics_own_where_they_have_them(measured: Measure) -> None:
    metrics = [_metrics(step, 12.0, **{"prompts/mean_length": 40.0 + step}) for step in range(3)]
    row = measured(metrics, [event for step in range(3) for event in _step(step, 50.0 * step)])
    assert row.prompt_tokens == pytest.approx(41.5)


def test_an_iteration_without_an_update_is_refused(measured: Measure) -> None:
    metrics = [_metrics(0, 12.0), _metrics(1, 12.0, updated=0.0)]
    with pytest.raises(DataError, match="made no update.*got step 1"):
        measured(metrics, [*_step(0, 0.0), *_step(1, 50.0)])


def test_a_run_that_ended_within_the_warm_up_is_refused(measured: Measure) -> None:
    with pytest.raises(DataError, match="No iteration is left"):
        measured([_metrics(0, 12.0)], _step(0, 0.0))


def test_a_number_that_is_missing_is_named(measured: Measure) -> None:
    metrics = [_metrics(0, 12.0), _metrics(1, 12.0, **{"time/step_s": None})]
    with pytest.raises(DataError, match="time/step_s"):
        measured(metrics, [*_step(0, 0.0), *_step(1, 50.0)])


def test_a_last_line_cut_short_is_left_out_and_damage_is_told_with_its_place(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step"')
    assert read_metrics(tmp_path) == [{"step": 0}]
    for damage, part in (("nonsense\n", "not JSON"), ("[1]\n", "not a JSON object")):
        file.write_text("{}\n" + damage)
        with pytest.raises(DataError, match=part) as caught:
            read_metrics(tmp_path)
        assert caught.value.where == f"{file}:2"


def test_idle_time_of_several_devices_and_copying_are_kept_by_device(measured: Measure) -> None:
    metrics = [
        _metrics(step, 4.0, **{"time/publish_s": 0.01 * step, "time/idle/0:0_s": 1.0, "time/idle/0:1_s": 1.0 + step})
        for step in range(4)
    ]
    seconds = measured(metrics, [event for step in range(4) for event in _step(step, 100.0 * step)]).median_s
    assert (seconds["publish"], seconds["idle/0:0"], seconds["idle/0:1"]) == (0.02, 1.0, 3.0)
