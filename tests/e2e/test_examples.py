"""The worked examples: a rollout that shares no code with Rollplex in a run, and one that is not on policy."""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

import pytest

from support.nodes import Start

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SIMPLE = EXAMPLES / "simple_rollout" / "service.py"
QUICK = {"rollout.forced_lengths": [], "rollout.max_new_tokens": 4}


@pytest.mark.timeout(200)
def test_a_rollout_written_from_the_protocol_alone_trains(start: Start) -> None:
    command = [sys.executable, str(SIMPLE)]
    run = start("--iterations", "1", overrides={**QUICK, "services.rollout": command}).wait()
    assert run.code == 0, run.stderr
    (row,) = run.metrics
    gaps = {name: value for name, value in row.items() if "sampling_logp_difference" in name}
    assert gaps, sorted(row)
    assert max(gaps.values()) < 1e-3, "its log-probabilities are those of the trainer"


@pytest.mark.timeout(200)
def test_the_gate_refuses_one_that_is_not_on_policy_by_name(start: Start) -> None:
    command = [sys.executable, str(EXAMPLES / "not_on_policy" / "service.py")]
    run = start("--iterations", "1", overrides={**QUICK, "services.rollout": command}).wait()
    assert run.code == 1
    assert "This rollout does not sample from the mapped weights; got on_policy: false" in run.stderr
    assert not (run.run_dir / "metrics.jsonl").exists() or not run.metrics


def test_it_is_short_and_imports_nothing_of_ours() -> None:
    text = SIMPLE.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    assert sum(token.type == tokenize.NEWLINE for token in tokens) - 1 < 150, "lines of code, without the docstring"
    assert "import rollplex" not in text
    assert "from rollplex" not in text
