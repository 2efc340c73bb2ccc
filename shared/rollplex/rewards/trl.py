"""TRL's signature: f(prompts=…, completions=…, completion_ids=…, **columns) -> one reward for each completion.

What a function may name, [G] for one entry for each completion of the group:

    <column>             [G] the row's value, repeated; as it stands in the file (images: paths)
    prompts              [G] the row's prompt, repeated
    completions          [G] texts; for a conversational prompt [{"role": "assistant", "content": text}]
    completion_ids       [G] lists of token ids, the stop token included
    completion_lengths   [G] how many these are
    finish_reasons       [G] "stop" (a stop token) or "length" (rollout.max_new_tokens)
    step                 training step, from 0
    trainer_state        an object with global_step, the same number
    log_metric           log_metric(name, number) reports a number, as rewards/<function>/<name>/mean
    pil_images           [G] the row's images, decoded: a list of PIL images (RGB), one list for all completions

As in TRL. Other than there, a function that does not take **kwargs gets only what it names, and **kwargs brings all of
the above but `pil_images`, which is decoded for those only that name it. A column comes before anything of ours but
prompts, completions and completion_ids, which no column may be called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollplex.rewards.arguments import Arguments
from rollplex.rewards.call import Call

IMAGES = "pil_images"
OFFERED = (
    "prompts",
    "completions",
    "completion_ids",
    "completion_lengths",
    "finish_reasons",
    "trainer_state",
    "log_metric",
    IMAGES,
)
"""Names by which the signature is known for TRL's; `step` is too common a name for it."""
_GIVEN = (*OFFERED, "step")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What of transformers' TrainerState there is."""

    global_step: int


def offered(call: Call, arguments: Arguments) -> dict[str, object]:
    """Everything that the function may be given, by name."""
    count = len(call)
    prompt = call.row["prompt"]
    completions: list[object] = list(call.texts)
    if not isinstance(prompt, str):
        completions = [[{"role": "assistant", "content": text}] for text in call.texts]
    available: dict[str, object] = {
        "completion_lengths": call.lengths,
        "finish_reasons": call.finish_reasons,
        "step": call.step,
        "trainer_state": TrainerState(global_step=call.step),
        "log_metric": call.log_metric,
        **{name: [value] * count for name, value in call.columns.items()},
        "prompts": [prompt] * count,
        "completions": completions,
        "completion_ids": [list(sample) for sample in call.ids],
    }
    if IMAGES in arguments.names and IMAGES not in available:
        available[IMAGES] = [call.load_images()] * count
    return available


def columns(arguments: Arguments) -> tuple[str, ...]:
    """The columns without which the function cannot be called."""
    return tuple(name for name in arguments.required if name not in _GIVEN)


def bind(function: Callable[..., object], arguments: Arguments) -> Callable[[Call], object]:
    """The function as a function of a call.

    Raises:
        RewardError: it cannot be called with keywords alone.
    """
    arguments.refuse_fixed()
    return lambda call: function(**arguments.pick(offered(call, arguments)))
