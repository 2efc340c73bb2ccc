"""The two layouts: which range of a part each rank holds, and which device has which ranks.

Owns: the shard rules of training and of rollout, the ranks of the devices of one group. Does not know: where anything
lies. What is refused: `refusals`.

A group is as many devices as the larger degree. Ranks of the finer layout are the devices in order, so that the shard
of a device in the coarser layout contains its shard in the finer one:

    training 4, rollout 2     device           0   1   2   3
                              training rank    0   1   2   3
                              rollout rank     0   0   1   1       engine 0: devices 0, 2; engine 1: devices 1, 3
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.layout.parallel.split import Part, Range, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingLayout:
    """q, k, v, gate and up apart, each cut into even ranges as PyTorch's DTensor does (Shard(0) for the column-wise,
    Shard(1) for the row-wise style, Replicate for the rest). Each number has one owner, or every rank has it.

    With more ranks than K/V heads a range is a part of a head. What K and V are computed from them is gathered over the
    ranks of a head, which costs less than a second copy of weights, gradients and optimizer state.
    """

    degree: int
    vision_sharded: bool = True
    """False: every rank has the whole vision tower."""
    padding_sharded: bool = True
    """The padded tensor is cut; False: only what transformers has of it, and a view may be impossible."""

    def shard(self, split: Split, part: Part, rank: int) -> Range:
        """What `rank` holds of `part`."""
        size = part.size if self.padding_sharded else part.real
        if split.axis == "whole" or (split.entry.tower == "vision" and not self.vision_sharded):
            return (0, size)
        step = -(-size // self.degree)
        return (min(rank * step, size), min((rank + 1) * step, size))


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLayout:
    """SGLang's: q|k|v and gate|up of a rank in one tensor, whole K/V heads, padded vocabulary and vision MLP."""

    degree: int
    vision_sharded: bool = True
    """False: every rank has the whole vision tower (mm_enable_dp_encoder)."""
    one_tensor: bool = False
    """The engine takes a parameter only as one strided tensor (SGLang). False: it takes the parts of a fused one apart
    (the transformers engine)."""

    def shard(self, split: Split, part: Part, rank: int) -> Range:
        """What `rank` holds of `part`, padding included."""
        if split.axis == "whole" or (split.entry.tower == "vision" and not self.vision_sharded):
            return (0, part.size)
        if part.shared_heads and self.degree > part.shared_heads:
            width = part.size // part.shared_heads
            head = rank * part.shared_heads // self.degree
            return (head * width, (head + 1) * width)
        width = part.size // self.degree
        return (rank * width, (rank + 1) * width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """What one device of a group is in both layouts."""

    device: int
    """Within the group."""
    training: int
    replica: int
    """Which of the group's copies of the trainer (data parallelism)."""
    rollout: int
    engine: int
    """Which of the group's engines."""


def group(training: TrainingLayout, rollout: RolloutLayout) -> tuple[Ranks, ...]:
    """The devices of one group. The degrees nest (`refusals.check`)."""
    size = max(training.degree, rollout.degree)
    replicas, engines = size // training.degree, size // rollout.degree
    return tuple(
        Ranks(
            device=device,
            training=device // replicas,
            replica=device % replicas,
            rollout=device // engines,
            engine=device % engines,
        )
        for device in range(size)
    )
