"""What a worker is told against what it finds: the parameter table, and where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from rollplex.errors import ModelError, StateError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.plan import DevicePlan, plan
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.presets import write_preset
from rollplex.protocol.common import ModelSpec, Parallel, Role
from rollplex.worker.agreement import agreed_model, own_device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that two ranks can split."""
    return write_preset("tiny-wide", tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    table = parameter_table(read_shape(folder), dtype="bfloat16", freeze_vision=True)
    return ModelSpec(path=str(folder), dtype="bfloat16", freeze_vision=True, table_hash=table.hash, never_sampled=())


@pytest.fixture(scope="module")
def devices(spec: ModelSpec) -> tuple[DevicePlan, ...]:
    """One of rank 0 and one of rank 1 in training; each samples alone."""
    model = agreed_model(spec)
    return plan(model.table, model.shape, TrainingLayout(degree=2), RolloutLayout(degree=1)).devices


def test_the_model_is_what_the_folder_says(folder: Path, spec: ModelSpec) -> None:
    model = agreed_model(spec)
    assert model.shape == read_shape(folder)
    assert model.table.hash == spec.table_hash


@pytest.mark.parametrize("changed", [{"table_hash": "0" * 64}, {"dtype": "float32"}, {"freeze_vision": False}], ids=str)
def test_another_table_than_the_coordinator_s_is_refused_with_both_hashes(
    spec: ModelSpec, changed: dict[str, object]
) -> None:
    told = replace(spec, **changed)
    with pytest.raises(ModelError, match="disagree about the parameter table") as caught:
        agreed_model(told)
    assert caught.value.needed == told.table_hash
    assert caught.value.got != told.table_hash
    assert caught.value.where == told.path


def test_a_worker_finds_its_device_by_the_rank_of_its_role(devices: tuple[DevicePlan, ...]) -> None:
    at = Parallel(training=2, device=1, rank=1)
    assert own_device(devices, at, Role.TRAINER) is own_device(devices, at, Role.PREFIX) is devices[1]
    assert own_device(devices, replace(at, rank=0), Role.ROLLOUT) is devices[1]


@pytest.mark.parametrize(("role", "rank", "needed"), [(Role.TRAINER, 0, 1), (Role.PREFIX, 0, 1), (Role.ROLLOUT, 1, 0)])
def test_another_rank_than_the_plan_s_is_refused(
    devices: tuple[DevicePlan, ...], role: Role, rank: int, needed: int
) -> None:
    with pytest.raises(StateError, match=f"another rank.*got rank {rank} on device 1; needed rank {needed}"):
        own_device(devices, Parallel(training=2, device=1, rank=rank), role)
