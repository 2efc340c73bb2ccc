"""How far two ways to compute the same may lie apart, by dtype, and why.

Every comparison adds up the same numbers in another order, so one pair per dtype serves all. Seen: the largest of any
comparison with the presets tiny, tiny-gpu and small at random weights (which are rougher than trained ones), rows with
one picture, three and none, groups of 8 with 1 to 40 tokens each, all losses.

               seen                        tolerance
    dtype      log-probability  gradient   log-probability  gradient   why
    float64    5e-15            3e-7       1e-5             1e-5       norms compute in float32, whatever the dtype
    float32    3e-5             2e-5       3e-4             3e-4       ten times: a larger model adds up more numbers
    bfloat16   0.21             0.17       1.0              0.5        each number has 8 bits; more would find nothing

What an implementation does wrong changes numbers in their first digits: the part of a gradient that came from the
prefix, counted twice, was 0.79 off. In bfloat16 only such gross errors show. The same configuration in float32
(`--set model.dtype=float32`) runs the same code with a sharper eye.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct


class Tolerance(Struct, frozen=True, kw_only=True):
    """logprobs: absolute. gradients: relative to the parameter's largest (`rollplex.verify.report`)."""

    logprobs: float
    gradients: float


TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "float64": Tolerance(logprobs=1e-5, gradients=1e-5),
    "float32": Tolerance(logprobs=3e-4, gradients=3e-4),
    "bfloat16": Tolerance(logprobs=1.0, gradients=0.5),
}
