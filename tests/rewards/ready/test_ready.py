"""The ready-made functions as a configuration names them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.errors import RewardError
from rollplex.protocol.reward import RewardFunction
from support.reward_child import Child, numbers


def test_without_math_verify_the_function_is_refused_when_it_is_loaded_and_the_others_are_not() -> None:
    code = (
        "import sys\n"
        "sys.modules['math_verify'] = None\n"
        "from rollplex.rewards.loading import load_function\n"
        "load_function('rollplex.rewards.ready:exact')\n"
        "assert 'sympy' not in sys.modules\n"
        "load_function('rollplex.rewards.ready:math')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "The reward function math needs math-verify; got No module named 'math_verify'; needed the extra: math. "
        "pip install 'rollplex[math]'"
    )


def test_the_functions_are_named_in_a_configuration_with_their_options(
    child: Child, functions: Callable[[str], Path]
) -> None:
    opened = child.open(
        ("rollplex.rewards.ready:exact", 1.0),
        ("rollplex.rewards.ready:math", 10.0),
        RewardFunction(spec="rollplex.rewards.ready:format", weight=100.0, options='{"pattern": "[78]"}'),
    )
    assert opened.notes[1].startswith("math of rollplex.rewards.ready is taken as TRL's, because of completions")
    assert numbers(child.rewarded(0, ["7", "8", ""]).rewards) == [111.0, 100.0, 0.0]
    failure = child.failed(2)
    assert failure.detail.startswith("The row has no right answer: columns [] (needed: reward_model.ground_truth, or")


def test_an_option_that_a_ready_made_function_does_not_know_is_refused(child: Child) -> None:
    item = RewardFunction(spec="rollplex.rewards.ready:iou", weight=1.0, options='{"treshold": 0.5}')
    with pytest.raises(RewardError, match=r"no argument 'treshold'.* Did you mean threshold\?"):
        child.open(item)
