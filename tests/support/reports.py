"""Reports of `rollplex verify`, made by hand."""

from __future__ import annotations

from rollplex.verify.report import Comparison, GradientDifference, LogprobDifference, Report


def make_report(*, logprobs: float | None = 1.9e-6, gradients: float | None = 3.3e-6) -> Report:
    """A report whose first comparison has these largest differences; 2e-4 is allowed."""
    bad_logprobs, bad_gradients = (value is None or value > 2e-4 for value in (logprobs, gradients))
    first = LogprobDifference(
        largest=logprobs, tolerance=2e-4, sample=2, position=1, tokens=16, beyond=int(bad_logprobs)
    )
    by_parameter = GradientDifference(
        largest=gradients, tolerance=2e-4, parameter="lm_head.weight", parameters=57, zero=0, beyond=int(bad_gradients)
    )
    other = LogprobDifference(largest=9.5e-7, tolerance=2e-4, sample=1, position=0, tokens=16, beyond=0)
    passed = not bad_logprobs and not bad_gradients
    return Report(
        passed=passed,
        config="config.yaml",
        data="train.jsonl",
        row=0,
        group_size=8,
        prompt_tokens=31,
        media=1,
        response_tokens=(2,) * 8,
        dtype="float32",
        comparisons=(
            Comparison(name="split against unsplit", passed=passed, logprobs=first, gradients=by_parameter),
            Comparison(name="rollout against trainer", passed=True, logprobs=other, gradients=None),
        ),
    )
