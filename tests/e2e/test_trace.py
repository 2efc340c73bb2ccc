"""The trace of a real run: it keeps to Perfetto's rules and shows what each schedule does with prefix work."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.trace.marks import Chapter
from rollplex.trace.query import Trace, read
from rollplex.trace.run import write_trace
from rollplex.trace.source import Source
from rollplex.trace.steps import Steps
from rollplex.trace.validate import problems
from rollplex.trace.where import hidden_share
from support.nodes import Finished, Start

pytestmark = pytest.mark.timeout(240)  # whichever test comes first starts two nodes
ITERATIONS = 3
UNITS = 4
"""Prefix units of a step, each of one prompt."""
LONG: dict[str, object] = {
    "rollout.max_new_tokens": 320,
    "rollout.forced_lengths": [6, 8, 4, 12, 10, 18, 24, 14, 40, 60, 320, 50],
}
"""A decode that lasts longer than a prefix worker ever waits for a core."""


class Traced:
    """A run that has ended, with what `rollplex trace` made of it."""

    def __init__(self, run: Finished) -> None:
        self.run = run
        self.lines: list[str] = []
        self.svg = run.run_dir / "timeline.svg"
        write_trace(run.run_dir, steps=None, output=None, svg=self.svg, say=self.lines.append)
        self.path: Path = run.run_dir / "trace.perfetto-trace"

    @property
    def trace(self) -> Trace:
        return read(self.path)

    @property
    def chapters(self) -> list[Chapter]:
        with Source(self.run.run_dir / "journal.sqlite") as source:
            return [chapter for chapter in source.chapters(Steps()) if chapter.done]


@pytest.fixture(scope="module")
def traced(start: Start) -> dict[str, Traced]:
    """Three iterations under overlap and under serial."""
    found = {}
    for schedule in ("overlap", "serial"):
        overrides = {**(LONG if schedule == "overlap" else {}), "run.schedule": schedule}
        run = start("--iterations", str(ITERATIONS), overrides=overrides).wait()
        assert run.code == 0, run.stderr
        found[schedule] = Traced(run)
    return found


def test_the_trace_of_a_real_run_keeps_to_perfettos_rules(traced: dict[str, Traced]) -> None:
    for one in traced.values():
        assert problems(one.path) == []
        trace = one.trace
        assert len(trace.on("iterations")) == ITERATIONS
        for name in ("reference prefix", "actor prefix", "score", "suffix", "prefix backward"):
            assert len(trace.named(name)) == ITERATIONS * UNITS, name
        assert len(trace.inside("optimizer step", "BEGIN to COMMIT")) == ITERATIONS
        assert len(trace.inside("prefill", "rollout")) == len(trace.inside("decode", "rollout")) == ITERATIONS


def test_under_overlap_actor_prefixes_lie_inside_the_rollouts_decode(traced: dict[str, Traced]) -> None:
    trace = traced["overlap"].trace
    inside = trace.inside("actor prefix", "decode")
    for decode in trace.named("decode"):
        assert any(one.within(decode) for one in inside)


def test_under_serial_every_actor_prefix_begins_after_the_last_decode_of_its_step(traced: dict[str, Traced]) -> None:
    trace = traced["serial"].trace
    decoded = {decode.args["step"]: decode.end_ns for decode in trace.named("decode")}  # the last one stays
    assert sorted(map(int, decoded)) == list(range(ITERATIONS))
    prefixes = trace.named("actor prefix")
    assert len(prefixes) == ITERATIONS * UNITS
    assert all(one.start_ns >= decoded[one.args["step"]] for one in prefixes)
    assert trace.inside("actor prefix", "decode") == []


def test_arrows_lead_every_group_to_its_update_and_every_actor_prefix_to_its_suffix(traced: dict[str, Traced]) -> None:
    for one in traced.values():
        kinds = [(a.kind, b.kind) for a, b in one.trace.arrows()]
        assert kinds.count(("group_finished", "reward")) == ITERATIONS * UNITS
        assert kinds.count(("reward", "suffix")) == ITERATIONS * UNITS
        assert kinds.count(("prefix_backward", "update")) == ITERATIONS * UNITS
        assert kinds.count(("actor_prefix", "suffix")) == ITERATIONS * UNITS


def test_the_hidden_share_is_the_one_that_the_run_wrote_itself(traced: dict[str, Traced]) -> None:
    for one in traced.values():
        written = [row["time/prefix_in_window"] for row in one.run.metrics]
        assert [hidden_share([chapter]) for chapter in one.chapters] == pytest.approx(written, abs=1e-6)
    assert hidden_share(traced["serial"].chapters) == 0.0


def test_picture_and_tables_are_made_too(traced: dict[str, Traced]) -> None:
    for schedule, one in traced.items():
        assert schedule in one.svg.read_text(encoding="utf-8")
        assert sum(line.startswith("where the time") for line in one.lines) == 2
        assert any(line.endswith("to the first iteration") for line in one.lines)
