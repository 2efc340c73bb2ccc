"""What a plan is asked: a configuration, a model's shape, devices and degrees, lengths in place of data.

Owns: how a configuration's iteration is shared out to data-parallel replicas and to engines. Does not know: bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollplex.config.config import Config
from rollplex.errors import ConfigError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.refusals import check
from rollplex.layout.parameters import ITEM_BYTES
from rollplex.layout.shape import ModelShape
from rollplex.protocol.inputs import DataChecked, SourceChecked
from rollplex_coordinator.memory.device_sizes import share


@dataclass(frozen=True, kw_only=True)
class Question:
    """One plan. `Question.checked()` before anything else."""

    config: Config
    shape: ModelShape
    model: str
    """Name of the model, for words."""
    gpus: int
    training: int
    """Tensor-parallel degree."""
    rollout: int
    """Tensor-parallel degree."""
    rollout_gpus: int
    """Of the disaggregated placement: devices that only sample. 0: it is not planned."""
    hbm_bytes: int
    """Of each device."""
    prompt_tokens: int
    """Of the longest prompt, media included."""
    image_tokens: int
    """Of those, tokens of pictures or videos."""
    micro_batch: int = 1
    """Whole sequences of one backward, where there are no prefixes."""
    baseline_gradients: str = ""
    """dtype of gradients, where there are no prefixes; empty: that of the model."""
    optimizer_on_host: bool = False
    """The state is in host memory; the device has room for none of it."""

    def checked(self) -> Question:
        """This question.

        Raises:
            ConfigError: degrees that the model or the devices cannot have, or lengths that contradict each other.
        """
        check(self.shape, self.training_layout, self.rollout_layout, devices=self.gpus)
        if not 0 <= self.image_tokens <= self.prompt_tokens:
            raise ConfigError(
                "A prompt has no more image tokens than tokens",
                got=f"{self.image_tokens} of {self.prompt_tokens}",
                where="--image-tokens",
            )
        if self.baseline_gradients and self.baseline_gradients not in ITEM_BYTES:
            raise ConfigError(
                "Gradients cannot have this dtype",
                got=self.baseline_gradients,
                needed=" or ".join(ITEM_BYTES),
                where="--baseline-gradients",
            )
        if not 0 <= self.rollout_gpus < self.gpus:
            raise ConfigError(
                "Disaggregation needs devices on both sides",
                got=f"{self.rollout_gpus} of {self.gpus} for rollout",
                needed=f"1 to {self.gpus - 1}" if self.gpus > 1 else "0",
                where="--rollout-gpus",
            )
        return self

    @property
    def training_layout(self) -> TrainingLayout:
        return TrainingLayout(degree=self.training)

    @property
    def rollout_layout(self) -> RolloutLayout:
        """SGLang takes a fused parameter only as one tensor."""
        return RolloutLayout(degree=self.rollout, one_tensor=self.config.rollout.engine == "sglang")

    @property
    def response_tokens(self) -> int:
        return self.config.rollout.longest_response

    @property
    def replicas(self) -> int:
        """Of the trainer (data parallelism)."""
        return self.gpus // self.training

    @property
    def engines(self) -> int:
        return self.gpus // self.rollout

    @property
    def data(self) -> DataChecked:
        """Data whose every row is as long as the longest."""
        shape = self.shape
        names = ["train", *(section.name for section in self.config.eval)]
        sources = tuple(
            SourceChecked(
                name=name,
                fingerprint="planned",
                num_rows=1,
                good_rows=None,
                rejected=(),
                max_prompt_tokens=self.prompt_tokens,
                max_media_rows=self.image_tokens * shape.vision.merge**2,
                max_media_tokens=self.image_tokens,
            )
            for name in names
        )
        return DataChecked(cause=0, sources=sources, never_sampled=(), stop_ids=(), row_width=shape.row_width)

    def with_batch(self, prompts: int) -> Question:
        """The same with prefix batches of so many prompts. A suffix batch that is set stays, where it is not larger."""
        batching = self.config.batching
        suffix = min(batching.suffix_prompts, prompts)
        changed = batching.model_copy(update={"prefix_prompts": prompts, "suffix_prompts": suffix})
        return replace(self, config=self.config.model_copy(update={"batching": changed}))


def share_of(config: Config, parts: int) -> Config:
    """What the busiest of `parts` replicas or engines has of an iteration. Batches are each replica's own, and no
    larger than its share."""
    shared = share(config, parts)
    fields = ("decode_prompts", "prefix_prompts", "suffix_prompts")
    prompts = shared.data.prompts_per_iteration
    smaller = {name: min(getattr(config.batching, name), prompts) for name in fields}
    return shared.model_copy(update={"batching": config.batching.model_copy(update=smaller)})
