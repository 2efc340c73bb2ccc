"""What several devices are refused for before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollplex.errors import ConfigError
from rollplex.presets import write_preset
from rollplex_coordinator.degrees import check_degrees
from rollplex_coordinator.options import Options, VerifyOptions
from support.core import make_config

OPTIONS = Options(
    config=Path("c.yaml"),
    run_dir=Path("run"),
    iterations=None,
    serve=False,
    external_workers=False,
    die_with_parent=False,
)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 heads, 4 of K and V, 4 of the tower."""
    return write_preset("tiny-wide", tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize(
    ("parallel", "arithmetic"),
    [
        ({"devices": 8, "training": 8}, "4 K/V heads / 8 ranks = 0.5|attention heads of the vision tower / 8 = 0.5"),
        ({"devices": 3, "training": 3}, "8 attention heads / 3 = 2.66667"),
        ({"devices": 6, "training": 2, "rollout": 3}, r"training 2, rollout 3: 3 = 1 x 2 \+ 1"),
        (
            {"devices": 5, "training": 2, "rollout": 3, "placement": "disaggregated", "rollout_devices": 3},
            "8 attention heads / 3",
        ),
    ],
)
def test_degrees_that_the_model_cannot_have_are_refused_with_the_arithmetic(
    wide_folder: Path, parallel: dict[str, Any], arithmetic: str
) -> None:
    with pytest.raises(ConfigError, match=arithmetic) as caught:
        check_degrees(make_config(wide_folder, parallel=parallel), OPTIONS)
    assert caught.value.where.startswith("parallel")
    assert "Change parallel.training" in caught.value.do or "Take a degree" in caught.value.do


def test_training_needs_whole_heads_of_keys_and_values(model_folder: Path) -> None:
    """Of which this model has one; each of two rollout ranks may have the same."""
    check_degrees(make_config(model_folder, parallel={"devices": 2, "training": 1, "rollout": 2}), OPTIONS)
    with pytest.raises(ConfigError, match="whole K/V heads on every rank; got 1 K/V heads / 2 ranks = 0.5"):
        check_degrees(make_config(model_folder, parallel={"devices": 2, "training": 2}), OPTIONS)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (replace(OPTIONS, verify=VerifyOptions(report=Path("r.json"))), "A verification is on one device"),
        (replace(OPTIONS, external_workers=True), "started by somebody else is on one device"),
    ],
)
def test_what_is_done_on_one_device_only_is_refused_by_name(wide_folder: Path, options: Options, what: str) -> None:
    check_degrees(make_config(wide_folder), options)
    with pytest.raises(ConfigError, match=f"{what}; got parallel.devices: 2; needed 1"):
        check_degrees(make_config(wide_folder, parallel={"devices": 2}), options)


def test_degrees_that_fit_pass(wide_folder: Path) -> None:
    for parallel in (
        {"devices": 4, "training": 4, "rollout": 2},
        {"devices": 4, "training": 2, "rollout": 1},
        {"devices": 3, "training": 2, "rollout": 1, "placement": "disaggregated", "rollout_devices": 1},
    ):
        check_degrees(make_config(wide_folder, parallel=parallel), OPTIONS)
