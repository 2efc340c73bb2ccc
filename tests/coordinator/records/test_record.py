"""What is written down, and when others can see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex.errors import JournalError
from rollplex.journal.events import PhaseEntered, UpdateBegin
from rollplex.journal.phases import Phase
from rollplex.journal.reader import Reader
from rollplex_coordinator.records.journal import Journal
from rollplex_coordinator.records.record import FLUSH_PERIOD_S, Record
from support.files import completion, events_in, scalars_in


class Clock:
    """In place of `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rollplex_coordinator.records.record.time", clock)
    return clock


def visible(run_dir: Path) -> int:
    """Events that a reader sees."""
    with Reader(run_dir / "journal.sqlite") as reader:
        return reader.last_id()


def test_the_time_of_a_phase_goes_to_the_phase_that_ends(tmp_path: Path, clock: Clock) -> None:
    record = Record(tmp_path, Journal(tmp_path / "journal.sqlite"))
    record.step = 3
    for phase, seconds in ((Phase.ROLLOUT, 2.0), (Phase.SCORE, 3.0), (Phase.ROLLOUT, 4.0), (Phase.IDLE, 5.0)):
        record.enter(phase)
        clock.now_s += seconds
    record.enter(Phase.EVAL)
    assert record.phase_seconds == {Phase.IDLE: 5.0, Phase.ROLLOUT: 6.0, Phase.SCORE: 3.0}
    record.journal.flush()
    with Reader(tmp_path / "journal.sqlite") as reader:
        entered = [r.event for r in reader.events_after(0, 10) if isinstance(r.event, PhaseEntered)]
    assert [(e.phase, e.start_s, e.step) for e in entered][:2] == [("ROLLOUT", 100.0, 3), ("SCORE", 102.0, 3)]
    record.close()


def test_events_are_seen_half_a_second_later_also_when_none_follows(tmp_path: Path, clock: Clock) -> None:
    record = Record(tmp_path, Journal(tmp_path / "journal.sqlite"))
    record.enter(Phase.LOAD)
    record.tick()
    assert visible(tmp_path) == 0
    clock.now_s += FLUSH_PERIOD_S
    record.tick()
    assert visible(tmp_path) == 1
    record.close()


def test_durable_events_are_seen_at_once_with_all_before_them(tmp_path: Path) -> None:
    record = Record(tmp_path, Journal(tmp_path / "journal.sqlite"))
    record.enter(Phase.LOAD)
    record.append_durable(UpdateBegin(step=0, version=0))
    assert visible(tmp_path) == 2
    record.close()


def test_what_is_written_goes_to_tensorboard_too_unless_it_is_off(tmp_path: Path) -> None:
    for name, on in (("on", True), ("off", False)):
        run_dir = tmp_path / name
        run_dir.mkdir()
        record = Record(run_dir, Journal(run_dir / "journal.sqlite"), tensorboard=on)
        record.metrics({"step": 4, "version": 4, "reward": 0.5, "kl": None})
        record.evaluation({"name": "held_out", "step": 5, "version": 5, "reward": 0.75, "count": 3.0})
        record.close()
    assert scalars_in(tmp_path / "on") == [
        (4, {"reward": 0.5}),
        (5, {"eval/held_out/reward": 0.75, "eval/held_out/count": 3.0}),
    ]
    assert not (tmp_path / "off" / "tensorboard").exists()


def test_a_resumed_run_goes_on_after_the_rows_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "num_tokens": 10.0}\n{"step": 1, "num_tokens": 25.0}\n')
    (tmp_path / "eval.jsonl").write_text(
        '{"name": "a", "step": 0, "reward": 0}\n{"name": "a", "step": 2, "reward": 1}\n'
    )
    record = Record(tmp_path, Journal(tmp_path / "journal.sqlite"))
    record.go_on(2)
    assert record.num_tokens == 25
    record.metrics({"step": 2, "loss": 0.5})
    record.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    kinds = [(event.step, event.HasField("session_log")) for event in events_in(tmp_path)[1:]]
    assert kinds == [(2, True), (2, False), (2, False)]
    assert scalars_in(tmp_path) == [(2, {"eval/a/reward": 1.0}), (2, {"loss": 0.5})]


def test_a_disk_that_refuses_a_line_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    record = Record(tmp_path, Journal(tmp_path / "journal.sqlite"))
    with pytest.raises(JournalError, match=r"cannot write metrics\.jsonl.*No space left"):
        record.metrics({"step": 0})
    record.close()


def test_lines_of_metrics_are_whole_and_seen_at_once(tmp_path: Path) -> None:
    record = Record(tmp_path, Journal(tmp_path / "journal.sqlite"))
    record.metrics({"step": 0, "loss": 0.5})
    record.evaluation({"name": "held_out", "reward": None}, [completion("seven")])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "loss": 0.5}
    assert (tmp_path / "eval.jsonl").read_text() == '{"name": "held_out", "reward": null}\n'
    assert json.loads((tmp_path / "completions.jsonl").read_text())["completion"] == "seven"
    record.close()


class Noting:
    """In place of a tracker."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float], str]] = []
        self.ended = False

    def put(self, step: int, values: dict[str, float], evaluation: str = "") -> None:
        self.rows.append((step, values, evaluation))

    def ask_to_end(self) -> None:
        self.ended = True

    def await_end(self, deadline_s: float) -> None:
        assert self.ended
        assert deadline_s > 0


def test_other_trackers_get_the_numbers_that_are_finite_and_are_ended_with_the_record(tmp_path: Path) -> None:
    record = Record(tmp_path, Journal(tmp_path / "journal.sqlite"), tensorboard=False)
    noting = Noting()
    record.trackers = (noting,)  # type: ignore[assignment] # what the record uses of one
    record.metrics({"step": 2, "version": 2, "reward": 0.5, "kl": None})
    record.evaluation({"name": "held-out", "step": 3, "version": 3, "reward": 0.25, "count": 8})
    record.close()
    assert noting.rows == [(2, {"reward": 0.5}, ""), (3, {"reward": 0.25, "count": 8}, "held-out")]
    assert noting.ended
