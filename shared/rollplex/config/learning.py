"""Sections that decide what is learned: model, data, rollout, rewards, algorithm, optimizer, batching.

Each section checks its own fields; what concerns several sections is in `checks`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, ValidationInfo, model_validator

from rollplex.config.base import FilePath, Section, Size, TokenText, dataset_folder
from rollplex.protocol.inputs import ShapeName
from rollplex.protocol.reward import Form
from rollplex.protocol.trainer import Loss, Scale


class ModelSection(Section):
    """Which model is trained."""

    path: FilePath
    """Folder in the format of Hugging Face: config.json, tokenizer.json, *.safetensors."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of weights, activations and K/V. The optimizer always works in float32 or better."""
    freeze_vision: bool = False
    """True: the vision tower is not trained; its weights are shared with the reference."""


def _against_base_if_path(text: str, info: ValidationInfo) -> str:
    """A format prompt is a text if it has a place for the question, else the path of a file."""
    base = (info.context or {}).get("base")
    return text if not text or "{{" in text or base is None else str((base / text).absolute())


ColumnName = Annotated[str, Field(min_length=1, max_length=256)]


class DataSection(Section):
    """What it is trained on."""

    path: FilePath
    """A .jsonl, .json or .parquet file, or a folder that datasets' save_to_disk wrote."""
    split: Annotated[str, Field(max_length=256)] = ""
    """Which split of a folder that has several. Empty: it has none."""
    shape: ShapeName = ShapeName.AUTO
    """Whose rows they are: trl, verl, easyr1, ms_swift or llava (VLM-R1's too). auto: by the columns of the first row.
    Evaluations' rows are read in the same way, by this, `columns` and `format_prompt`."""
    columns: Annotated[dict[ColumnName, ColumnName], Field(max_length=32)] = Field(default_factory=dict)
    """Names that the shape knows, each with the column that is meant: {prompt: question, images: pics}."""
    format_prompt: Annotated[str, Field(max_length=65_536), AfterValidator(_against_base_if_path)] = ""
    """jinja2 text, or a file of it, that is put around each question, which is {{ content }} in it (as in EasyR1). The
    question is the last user message, or the plain text. Empty: prompts stay as they are."""
    chat_template: FilePath | None = None
    """jinja2 file to use instead of the model's own chat template."""
    image_dir: FilePath | None = None
    """Folder that the rows' image paths are relative to, and may not leave. Absent: the folder of `path`, or `path`."""
    prompts_per_iteration: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Prompts (groups) of one iteration, so of one optimizer step."""
    shuffle: bool = True
    """True: each epoch in its own order, a function of the seed and the epoch. False: file order."""
    max_prompt_tokens: Annotated[int, Field(ge=0)] = 0
    """Rows with longer prompts, image tokens included, are bad rows. 0: no limit."""
    max_image_pixels: Annotated[int, Field(ge=1, le=80_000_000)] = 16_777_216
    """Images that declare more pixels (width x height) are refused before they are decoded."""
    min_pixels: Annotated[int, Field(ge=0, le=80_000_000)] = 0
    """Smaller images, and frames of videos, are scaled up to so many pixels. 0: as the model's processor files say."""
    max_pixels: Annotated[int, Field(ge=0, le=80_000_000)] = 0
    """Larger images, and frames of videos, are scaled down to so many pixels. 0: as the model's processor files say."""
    video_fps: Annotated[float, Field(ge=0.001, le=1000.0)] = 2.0
    """Frames taken of each second of a video file, evenly; not of videos that are lists of frames."""
    max_frames: Annotated[int, Field(ge=2, le=4096)] = 64
    """Most frames taken of one video file; of a longer one fewer a second."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """What a row that cannot be used does: end the run before it starts, or be left out (and counted)."""

    @property
    def image_folder(self) -> Path:
        """`image_dir`, or where the dataset is."""
        return self.image_dir or dataset_folder(self.path)


class SglangSection(Section):
    """Sizes of SGLang's engine."""

    kv_tokens: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Tokens that the pool of keys and values holds. 0: as many as all prompts and responses of a decode batch can
    have; with fewer, requests wait."""
    max_running: Annotated[int, Field(ge=1, le=4096)] = 256
    """Responses decoded at the same time, at most."""
    prefill_tokens: Annotated[int, Field(ge=64, le=131_072)] = 8192
    """Tokens of one prefill step."""
    own_weights: bool = False
    """True: SGLang holds a copy of its own of the weights, into which each update is copied. For comparisons with
    systems that do so; it needs twice the memory for weights."""


class RolloutSection(Section):
    """How responses are sampled."""

    engine: Literal["transformers", "sglang", "replay"] = "transformers"
    """What generates the tokens: transformers' own modules; SGLang, on a GPU; or nothing: recorded responses again."""
    sglang: SglangSection = SglangSection()
    """Sizes of SGLang's engine."""
    replay: FilePath | None = None
    """For the engine replay: the completions.jsonl of a run that logged all of its responses with their tokens. Such a
    run compares gradients: what it learns from was not sampled by its own weights."""
    replay_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0
    """For the engine replay: seconds over which the ends of an iteration's responses are spread."""
    group_size: Annotated[int, Field(ge=2, le=65_536)] = 8
    """Responses per prompt. A group of one has no baseline."""
    max_new_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 128
    """Longest response in tokens, its stop token included."""
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """Divides the logits, in sampling and in every log-probability. Greedy decoding is for evaluations only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: the smallest set of ids with so much probability. 1: off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Only the so many most probable ids. 0: off."""
    stop_tokens: tuple[TokenText, ...] = ()
    """Tokens (text) that end a response. Empty: the model's own end-of-sequence ids."""
    never_sample: tuple[TokenText, ...] = ()
    """Tokens (text) outside every softmax, in addition to the media and padding ids."""
    forced_lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """For benches and tests: sample s of group g gets length forced_lengths[(g * group_size + s) % len], whatever it
    samples. Empty: off."""

    @property
    def longest_response(self) -> int:
        """Tokens that a response which is trained can have."""
        return max(self.forced_lengths, default=self.max_new_tokens)


MAX_OPTIONS_CHARS = 65_536
_SPEC = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^\x00:]+\.py):[A-Za-z_]\w*")


def _names_a_function(spec: str) -> str:
    if _SPEC.fullmatch(spec) is None:
        raise ValueError("file.py:function or package.module:function, e.g. my_rewards.py:right")
    return spec


def _function_against_base(spec: str, info: ValidationInfo) -> str:
    place, _, name = spec.rpartition(":")
    base = (info.context or {}).get("base")
    if base is None or not place.endswith(".py"):
        return spec
    return f"{(base / place).absolute()}:{name}"


def _keywords(options: dict[str, JsonValue]) -> dict[str, JsonValue]:
    wrong = next((name for name in options if not name.isidentifier()), None)
    if wrong is not None:
        raise ValueError(f"names of arguments; {wrong!r} is none")
    if len(json.dumps(options, allow_nan=False)) > MAX_OPTIONS_CHARS:
        raise ValueError(f"at most {MAX_OPTIONS_CHARS} characters as JSON")
    return options


class RewardFunctionSection(Section):
    """One function, in the signature of TRL (f(prompts, completions, <columns>, **kwargs) -> list of floats), verl
    (f(data_source, solution_str, ground_truth, extra_info)) or EasyR1 (f(reward_inputs))."""

    function: Annotated[
        str, Field(max_length=4096), AfterValidator(_names_a_function), AfterValidator(_function_against_base)
    ]
    """package.module:function, or path/to/file.py:function."""
    weight: float = 1.0
    """Its factor in the sum. 0: computed and reported, not learned from."""
    signature: Form = Form.AUTO
    """auto (told from the names of its arguments), trl, verl or easyr1."""
    options: Annotated[dict[str, JsonValue], AfterValidator(_keywords)] = Field(default_factory=dict, max_length=64)
    """Further keyword arguments, given with every call; JSON values."""

    @property
    def name(self) -> str:
        """The function's name, under which its mean is reported: rewards/<name>/mean."""
        return self.function.rpartition(":")[2]


class RewardsSection(Section):
    """What a response is worth."""

    functions: Annotated[tuple[RewardFunctionSection, ...], Field(min_length=1, max_length=64)]
    """The functions; a response's reward is their weighted sum."""
    time_limit_s: Annotated[float, Field(gt=0.0)] = 30.0
    """Seconds that all functions together may take for one group."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that run the functions, each on one group at a time."""
    memory_limit: Size = 0
    """Bytes of address space of each process that runs the functions. 0: no limit."""
    on_error: Literal["fail", "skip_group"] = "fail"
    """What a function that raises, hangs or returns nonsense does: end the run, or leave out the group, counted."""


_UNSCALED = (Loss.DR_GRPO, Loss.RLOO)


class AlgorithmSection(Section):
    """Advantages and loss."""

    loss: Loss = Loss.GRPO
    """grpo, dr_grpo, dapo (token mean), rloo or gspo."""
    scale_rewards: Scale = Scale.GROUP
    """What advantages are divided by: the standard deviation of the group, of the batch, or nothing. Absent: as the
    paper of the loss has it, which is none for dr_grpo (arXiv 2503.20783) and rloo (arXiv 2402.14740), group for grpo,
    dapo and gspo."""
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.2
    """The probability ratio is clipped above 1 + clip_high."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from the reference model (Schulman, "Approximating KL divergence"). It is a term of
    the loss, and there the gradient of k1 has expectation 0 on policy: with k1 the divergence is measured, but nothing
    pulls towards the reference."""
    beta: Annotated[float, Field(ge=0.0)] = 0.04
    """Factor of the divergence in the loss. 0: no reference model is kept or run."""
    entropy_bonus: float = 0.0
    """Factor of the token entropy, taken off the loss; aggregated over tokens as the loss's policy term is."""

    @model_validator(mode="before")
    @classmethod
    def _scale_of_the_loss(cls, given: object) -> object:
        """Fills in what `scale_rewards` is if it is absent, so that a dump says it."""
        if isinstance(given, dict) and "scale_rewards" not in given and given.get("loss") in _UNSCALED:
            return {**given, "scale_rewards": Scale.NONE}
        return given


class OptimizerSection(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw or sgd."""
    lr: Annotated[float, Field(ge=0.0)] = 1e-6
    """Learning rate at the end of warm-up. 0: every step is made, and the weights stay; for measurements."""
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    """AdamW's decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW's term in the denominator."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """SGD's momentum."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Of matrices; norms and biases are never decayed."""
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """The gradient is scaled down to this norm. 0: off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate from the end of warm-up on. With p = (k - warmup_steps) / (run.iterations - warmup_steps) at update
    k, counted from 0, and f = final_lr_ratio, `lr` is multiplied by 1, by 1 - (1 - f) p, or by
    f + (1 - f) (1 + cos(pi p)) / 2."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly: update k, counted from 0, has (k + 1) / warmup_steps of
    `lr`. So the first has a rate above 0, and the last of them, like the update after it, the full one."""
    final_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Part of `lr` at which linear and cosine end, where p = 1: one update after the run's last, which is a step above
    it. So no update has a rate of 0."""


class BatchingSection(Section):
    """How many prompts are computed together. Part of the result's bits, so never derived from free memory."""

    decode_prompts: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Prompts of one decode batch. 0: all of the iteration; of several engines, an equal share for each."""
    prefix_prompts: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Prompts of one prefix batch. 0: all of the iteration; of several replicas, an equal share for each."""
    suffix_prompts: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Groups of one suffix batch; divides the prefix batch. 0: the whole prefix batch."""
