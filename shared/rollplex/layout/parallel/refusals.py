"""Layouts that cannot be, each with the arithmetic that says so. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.errors import ConfigError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parameters import VOCAB_MULTIPLE, vision_mlp_width
from rollplex.layout.shape import ModelShape


def check(shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, *, devices: int) -> None:
    """Refuse degrees that the model or the devices cannot have.

    Raises:
        ConfigError: names the first number that does not divide, with the division.
    """
    _check_devices(training.degree, rollout.degree, devices)
    for where, layout in (("training", training), ("rollout", rollout)):
        vision_degree = layout.degree if layout.vision_sharded else 1
        for what, number, by in _divisions(shape, layout.degree, vision_degree):
            if number % by:
                raise _indivisible(where, what, number, by)
    if shape.kv_heads * shape.head_dim % training.degree:
        raise _indivisible("training", "rows of K and V", shape.kv_heads * shape.head_dim, training.degree)


def _divisions(shape: ModelShape, degree: int, vision_degree: int) -> Iterator[tuple[str, int, int]]:
    """(what, number, what must divide it) of one layout."""
    vision = shape.vision
    yield "attention heads", shape.heads, degree
    if shape.kv_heads >= degree:
        yield "K/V heads", shape.kv_heads, degree
    else:
        yield "ranks, for each of which there must be one K/V head,", degree, shape.kv_heads
    yield "columns of the MLP (intermediate_size)", shape.intermediate, degree
    yield "rows of the padded vocabulary", -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, degree
    yield "attention heads of the vision tower", vision.heads, vision_degree
    padded = vision_mlp_width(vision) if shape.architecture == "qwen2_5_vl" else vision.intermediate
    yield "columns of the vision MLP as stored", padded, vision_degree
    yield "columns of the vision tower's merger", vision.merger_width, vision_degree


def _check_devices(training: int, rollout: int, devices: int) -> None:
    for where, degree in (("training", training), ("rollout", rollout)):
        if degree < 1:
            raise ConfigError(
                "A tensor-parallel degree is less than one", got=str(degree), needed="1 or more", where=where
            )
    smaller, larger = sorted((training, rollout))
    times, left = divmod(larger, smaller)
    if left:
        raise ConfigError(
            "The two tensor-parallel degrees do not nest, so that no shard of one lies within a shard of the other",
            got=f"training {training}, rollout {rollout}: {larger} = {times} x {smaller} + {left}",
            needed="the larger a multiple of the smaller",
        )
    if larger > devices or devices % larger:
        needed = f"at least {larger}" if larger > devices else f"a multiple of {larger}"
        raise ConfigError(
            "The devices do not hold the tensor-parallel ranks",
            got=f"{devices} devices for training {training} and rollout {rollout}: "
            f"{devices} = {devices // larger} x {larger} + {devices % larger}",
            needed=f"{needed} devices",
        )


def _indivisible(where: str, what: str, number: int, by: int) -> ConfigError:
    return ConfigError(
        "The model cannot be split over so many tensor-parallel ranks",
        got=f"{number} {what} / {by} = {number / by:g}",
        needed="a whole number",
        where=where,
    )
