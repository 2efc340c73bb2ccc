"""A layout plan carried out on real bytes: segments, updates by the trainers, copies, and what rollout then reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.places import Place
from rollplex.layout.parallel.plan import Alias, DevicePlan, LayoutPlan, Parameter
from rollplex.layout.parallel.transfers import target_transfers, transfers
from rollplex.layout.shape import ModelShape
from support.slices import DEGREES, Model, full_model, sampled, small_shape, trained

Array = NDArray[Any]


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Small models that can be split by every degree up to 8: ratios of heads, paddings, ties and both towers."""
    heads = 8 * draw(st.integers(1, 2))
    vision: dict[str, Any] = {"depth": draw(st.integers(0, 2)), "intermediate": draw(st.integers(1, 70))}
    if draw(st.booleans()):
        vision |= {"architecture": "qwen2_vl", "intermediate": 64}
    return small_shape(
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if heads % n == 0])),
        head_dim=8,
        hidden=(hidden := draw(st.integers(1, 9))),
        layers=draw(st.integers(1, 2)),
        intermediate=8 * draw(st.integers(1, 4)),
        vocab=draw(st.integers(1, 200)),
        tied=draw(st.booleans()),
        vision={**vision, "out_hidden": hidden},
    )


trainings = st.builds(
    TrainingLayout, degree=st.sampled_from(DEGREES), vision_sharded=st.booleans(), padding_sharded=st.booleans()
)
rollouts = st.builds(
    RolloutLayout, degree=st.sampled_from(DEGREES), vision_sharded=st.booleans(), one_tensor=st.booleans()
)


class Segments:
    """The bytes of every device of a group."""

    def __init__(self, plan: LayoutPlan, contents: Sequence[NDArray[np.uint8]] | None = None) -> None:
        """contents: of segments that are there; zeros unless given."""
        self.dtype = np.dtype(f"u{plan.item_bytes}")
        self._bytes = list(contents or [np.zeros(device.storage.total_bytes, np.uint8) for device in plan.devices])

    def content(self, device: int) -> bytes:
        """All of a device's segment."""
        return self._bytes[device].tobytes()

    def at(self, place: Place) -> Array:
        """The array at `place`, in the segment itself."""
        strides = [stride * self.dtype.itemsize for stride in place.strides]
        last = place.offset + sum((n - 1) * stride for n, stride in zip(place.shape, strides, strict=True) if n)
        segment = self._bytes[place.device]
        assert 0 <= place.offset <= last + self.dtype.itemsize <= len(segment), "outside the segment"
        return np.ndarray(place.shape, self.dtype, segment, place.offset, strides)


def verify(plan: LayoutPlan, shape: ModelShape, dtype: str) -> None:
    """Carry the plan out and compare every rank's every parameter with slices of the full tensors.

    Raises:
        AssertionError: a byte that is wrong, in no piece, in two, or copied though it is there.
    """
    model = full_model(shape, dtype)
    segments = Segments(plan)
    for device in plan.devices:
        _train(device, segments, trained(model, shape, plan.training, device.ranks.training))
    for device in plan.devices:
        _check_aliases(device, segments, sampled(model, shape, plan.rollout, device.ranks.rollout))
    for device in plan.devices:
        _copy(device, segments)
    for device in plan.devices:
        _check_sampled(device, segments, sampled(model, shape, plan.rollout, device.ranks.rollout))
        _check_trained(device, segments, trained(model, shape, plan.training, device.ranks.training))
        _check_once(device, plan)


def carried_out(plan: LayoutPlan, shape: ModelShape, dtype: str) -> Segments:
    """Every device's segment after its trainer has written its shards, and all copies of an update are made."""
    model, segments = full_model(shape, dtype), Segments(plan)
    for device in plan.devices:
        _train(device, segments, trained(model, shape, plan.training, device.ranks.training))
    for device in plan.devices:
        _copy(device, segments)
    return segments


def verify_target(training: LayoutPlan, target: LayoutPlan, shape: ModelShape, dtype: str) -> None:
    """Fill devices that only sample from those that train, and compare as `verify`. Raises AssertionError."""
    model, sources, segments = full_model(shape, dtype), Segments(training), Segments(target)
    for device in training.devices:
        _train(device, sources, trained(model, shape, training.training, device.ranks.training))
    for device in target.devices:
        for transfer in target_transfers(training, device, trained_only=False):
            assert transfer.source.shape == transfer.target.shape
            assert transfer.kind == "rebuild"
            assert not segments.at(transfer.target).any(), f"{transfer.parameter}: copied twice"
            segments.at(transfer.target)[...] = sources.at(transfer.source)
        _check_sampled(device, segments, sampled(model, shape, target.rollout, device.ranks.rollout))


def check_contents(plan: LayoutPlan, contents: Sequence[NDArray[np.uint8]], model: Model, shape: ModelShape) -> int:
    """Compare segments that are there, by device, with slices of the full tensors, as rollout and training read them.

    Returns how many bytes of rollout parameters were copied to where they lie.

    Raises:
        AssertionError: a parameter that differs in a byte.
    """
    segments = Segments(plan, contents)
    for device in plan.devices:
        expected = sampled(model, shape, plan.rollout, device.ranks.rollout)
        _check_aliases(device, segments, expected)
        _check_sampled(device, segments, expected)
        _check_trained(device, segments, trained(model, shape, plan.training, device.ranks.training))
    return sum(transfer.size_bytes for device in plan.devices for transfer in transfers(device, trained_only=False))


def _train(device: DevicePlan, segments: Segments, expected: Model) -> None:
    assert {p.name for p in device.training} == set(expected)
    for parameter in device.training:
        assert parameter.view is not None
        assert parameter.shape == expected[parameter.name].shape, parameter.name
        segments.at(parameter.view)[...] = expected[parameter.name]


def _check_trained(device: DevicePlan, segments: Segments, expected: Model) -> None:
    """No copy of any device wrote into what a trainer owns."""
    for parameter in device.training:
        assert parameter.view is not None
        assert np.array_equal(segments.at(parameter.view), expected[parameter.name]), parameter.name


def _copy(device: DevicePlan, segments: Segments) -> None:
    for transfer in transfers(device, trained_only=False):
        assert transfer.source.shape == transfer.target.shape
        segments.at(transfer.target)[...] = segments.at(transfer.source)


def _check_aliases(device: DevicePlan, segments: Segments, expected: Model) -> None:
    """What is aliased is right before anything is copied."""
    for parameter in device.rollout:
        for piece in parameter.pieces:
            if isinstance(piece.holding, Alias):
                wanted = _range(parameter, expected[parameter.name], piece.to)
                assert np.array_equal(segments.at(piece.at), wanted), f"{parameter.name} {piece.to}"


def _check_sampled(device: DevicePlan, segments: Segments, expected: Model) -> None:
    assert {p.name for p in device.rollout} == set(expected)
    for parameter in device.rollout:
        wanted = expected[parameter.name]
        assert parameter.shape == wanted.shape, parameter.name
        for piece in parameter.pieces:
            assert np.array_equal(segments.at(piece.at), _range(parameter, wanted, piece.to)), parameter.name
        if parameter.view is not None:
            assert np.array_equal(segments.at(parameter.view), wanted), parameter.name


def _range(parameter: Parameter, value: Array, taken: tuple[int, int]) -> Array:
    where = slice(*taken)
    return value[:, where] if parameter.stored.split.axis == "columns" else value[where]


def _check_once(device: DevicePlan, plan: LayoutPlan) -> None:
    """Each number of each parameter is in one piece; the trainer's are never copied; nothing is stored for nobody."""
    marks = Segments(plan)
    for parameter in device.training:
        for piece in parameter.pieces:
            marks.at(piece.at)[...] += 1
    for parameter in device.rollout:
        assert parameter.pieces[0].to[0] == 0
        for before, after in zip(parameter.pieces, parameter.pieces[1:], strict=False):
            assert before.to[1] == after.to[0], f"{parameter.name}: a gap or an overlap at {after.to[0]}"
        assert sum(piece.size_bytes for piece in parameter.pieces) == parameter.size_bytes
        for piece in parameter.pieces:
            here = marks.at(piece.at)
            assert here.max() <= 1, f"{parameter.name}: {piece.to} lies in two pieces"
            assert isinstance(piece.holding, Alias) or not here.any(), f"{parameter.name}: copied though it is there"
            here += 2
    for stored in (*device.storage.shared, *(c for c in device.storage.copies if c is not None)):
        for number, shard in enumerate(stored.shards):
            assert marks.at(stored.place(number, shard)).all(), f"{stored.name}: stored for nobody"
