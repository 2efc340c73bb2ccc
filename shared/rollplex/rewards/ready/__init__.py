"""Ready-made reward functions, named in the configuration as `rollplex.rewards.ready:exact` and so on.

    exact     1 if the answer is the right text, 0 if not
    choice    1 if the answer names the right letter of a multiple-choice question, 0 if not
    iou       how well a box in the text covers the right box, 0 to 1
    format    1 if the text has the form <think>…</think><answer>…</answer>, or another that is given, 0 if not
    math      1 if the answer is mathematically equal to the right one, 0 if not (needs the extra `math`)

    rewards:
      functions:
        - {function: "rollplex.rewards.ready:iou", options: {threshold: 0.5}}
        - {function: "rollplex.rewards.ready:format", weight: 0.1}

The right answer is the row's reward_model.ground_truth, or its column ground_truth, answer or solution, in this order;
option `column` names another. In a completion the answer is what the last <answer>…</answer> holds, else the last
\\boxed{…}, else all of it. A row without a right answer that the function can use is an error, never a 0.
"""

from __future__ import annotations

from collections.abc import Callable

from rollplex.errors import RewardError
from rollplex.rewards.ready.boxes import iou
from rollplex.rewards.ready.words import choice, exact, format  # noqa: A004 - names that users write

__all__ = ["choice", "exact", "format", "iou"]


def __getattr__(name: str) -> Callable[..., object]:
    """`math`, imported when it is asked for: it needs math-verify and sympy, which take two seconds."""
    if name != "math":
        raise AttributeError(name)
    try:
        from rollplex.rewards.ready.mathematics import math  # noqa: PLC0415 - an extra, and slow
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("rollplex"):
            raise
        raise RewardError(
            "The reward function math needs math-verify",
            got=f"No module named {error.name!r}",
            needed="the extra: math",
            do="pip install 'rollplex[math]'",
        ) from error
    return math
